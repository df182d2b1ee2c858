"""Kernels in C++ for a step on a CPU: attention of all its requests in one call, and what surrounds matrix products.

interface.h    what Python hands over
vector.h       a thin layer of vector types: the same source for every kind of processor
formats.h      how each kind multiplies: float32, pairs of bfloat16 (avx512_bf16), tiles of bfloat16 (AMX)
attention.h    prefill attention
tokenwise.h    RMSNorm with residual, gated activations, rotary embedding, float32 logits
build.cpp      one build; dispatch.cpp: which builds there are, and which this processor runs
build.py       compiles them into one library, at installation
library.py     finds the library at start, and checks it
calls.py       the kernels as functions of tensors
groups.py      which requests of a step share a prefix
"""
