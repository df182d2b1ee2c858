"""What runs in the scheduler process between loading the model and the first request.

made_up_request.py  a forward pass without a client
memory_profile.py   how much memory an input takes, and the division of the budget
parity_gate.py      all paths give the same answers, or nothing is served
install.py          in SGLang: when they run, and the limits that follow from them
"""
