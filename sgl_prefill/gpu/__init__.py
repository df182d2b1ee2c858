"""Shared-prefix attention on a GPU (BatchLLM, section 5): launch arguments for the attention kernels that SGLang has."""
