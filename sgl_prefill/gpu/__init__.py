"""Shared-prefix attention on a GPU (BatchLLM, section 5): what the attention kernels that are there are given to launch."""
