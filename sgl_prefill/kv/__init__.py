"""Memory for suffix-KV eviction (PrefillOnly, section 5): one layer's suffix KV is live at a time.

host.py, cuda.py   buffers whose tails are the same physical memory

`core/kv_plan.py` decides how much of a request is durable. In `port/kv/`, `pool.py` is SGLang's KV pool over these buffers,
`allocator.py` hands out its slots, and `radix_cache.py` is the prefix cache, which sees durable slots only.
"""
