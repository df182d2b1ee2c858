"""Checks before a start, and what runs between loading the model and the first request.

examine.py          the machine: CUDA, packages, memory, ports
arguments.py        SGLang's arguments: required, default and contradicting values
loaded_model.py     interface of a loaded model that runs synthetic batches
memory_profile.py   measures how much memory an input takes
jct_profile.py      measures how long steps take
parity_gate.py      refuses to serve unless all paths give the same answers
progress_bar.py     how far long work is, in a terminal or a log
prepare.py          the order of these parts, and the memory plan
"""
