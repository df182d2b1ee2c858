"""Memory for suffix-KV eviction (PrefillOnly, section 5): one layer's suffix KV is live at a time.

host.py, cuda.py   buffers whose tails are the same physical memory

`core/kv_plan.py` decides how much of a request is durable; `port/kv/pool.py`, `kv_allocator.py` and `radix_cache.py` are SGLang's
KV pool over such buffers, who holds which slot of it, and the prefix cache that sees durable slots only.
"""
