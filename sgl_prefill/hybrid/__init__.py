"""One-pass hybrid prefilling (PrefillOnly, section 4): attention sees the whole prompt, all else runs chunk by chunk.

trace.py       the model's body as one graph, and what makes a body unfit
split.py       the graph cut at its attention layers into token-wise pieces, and a plan of few buffers for what crosses the cuts
body.py        the forward pass over the pieces
chunk_size.py  the fewest tokens of a chunk that cost no time on this machine

`port/runner/forward.py` puts it into SGLang's model runner: when it traces, and which forward passes take this path.
"""
