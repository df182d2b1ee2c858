"""SGLang on a machine without an accelerator: a platform, an attention backend and native kernels."""
