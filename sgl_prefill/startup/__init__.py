"""Checks before a start, and what runs between loading the model and the first request.

examine.py          the machine: CUDA, packages, memory, ports
arguments.py        SGLang's arguments: required, default and contradicting values
loaded_model.py     what these parts need of the engine: a model that can run steps without clients
memory_profile.py   how much memory an input takes
jct_profile.py      how long steps take
parity_gate.py      all paths give the same answers, or nothing is served
prepare.py          all of it in order, and the division of the memory
"""
