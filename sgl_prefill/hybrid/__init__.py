"""One-pass hybrid prefilling (PrefillOnly, section 4): attention sees the whole prompt, everything else runs chunk by chunk.

trace.py       the model's body as one graph; the reasons why a body cannot be recorded
split.py       the graph cut at its attentions into token-wise pieces, and a plan of few buffers for the values that cross a cut
body.py        the forward pass over the pieces

`port/runner/forward.py` puts it into SGLang's model runner. `startup/chunk_size.py` measures the chunk size.
"""
