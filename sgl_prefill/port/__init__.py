"""The only place that knows SGLang's insides: another release of SGLang is a change in this package.

declare.py, hooks.py   every touch of SGLang in lists: hooks, overridden methods, attributes that we set, switches, routes
activation.py          applies the hooks, and proves that they took
fingerprints.py        is the installed SGLang the one that all this was written against?
launch.py, engine.py   the server and the offline engine; processes.py: what runs in each of their processes
prefork.py             scheduler and detokenizer forked from a process that has imported SGLang meanwhile
scheduler.py           a policy of ours inside SGLang's prefill admission; radix_cache.py: the prefix cache that it follows
kv.py                  suffix-KV eviction: kv_pool.py, kv_allocator.py
hybrid.py              hybrid prefilling in the model runner
startup.py             when `startup/` runs; loaded_model.py: the model as it sees it

`cpu/` (the CPU platform) and `api/` (HTTP routes) know SGLang too, each of its own side.
"""
