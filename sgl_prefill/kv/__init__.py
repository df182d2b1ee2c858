"""Suffix-KV eviction by aliased memory (PrefillOnly, section 5): one layer's suffix KV is live at a time.

host.py, cuda.py   buffers whose tails are the same physical memory
pool.py            SGLang's KV pool over them: [durable slots | scratch slots] in every layer
allocator.py       who holds which slot
prefix_cache.py    SGLang's radix cache, which sees durable slots only
install.py         in SGLang: sizes, admission, allocation, limits

The plan itself, how much of a request is durable, is `core/kv_plan.py`.
"""

# Under this name SGLang's registry of radix caches knows ours (`--radix-cache-backend`).
PREFIX_CACHE_NAME = "sgl_prefill_suffix_kv"
