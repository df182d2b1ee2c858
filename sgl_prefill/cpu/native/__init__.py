"""C++ kernels for a step on a CPU.

interface.h    arguments of the kernels; calls.py: the kernels as functions of tensors
vector.h       vector types: one source for all kinds of processor
formats.h      products of each kind: float32, pairs of bfloat16 (avx512_bf16), tiles of bfloat16 (AMX)
attention.h    prefill attention of all requests in one call
tokenwise.h    RMSNorm with residual, gated activations, rotary embedding, float32 logits
products.h     matrix products with AMX
build.cpp      one build for one kind of processor; dispatch.cpp: selects a build
build.py       compiles all builds into one library, at installation; library.py: loads and checks it at start
"""
