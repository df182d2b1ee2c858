"""The parts inside SGLang's scheduler process, by what they touch of SGLang.

steps/      the scheduler: which requests share the next step, refusals, metrics, traces, the request log
kv/         radix cache, KV pool and allocator: suffix-KV eviction
runner/     model runner and logits: one-pass hybrid prefilling, replays, stable answers, answers of several tokens
dashboard/  what the page `/dashboard` shows of this process
"""
