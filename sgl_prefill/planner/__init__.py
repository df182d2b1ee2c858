"""What would happen: a trace replayed on a simulated clock through the policy, index and prefix cache of the engine.

workloads.py   the paper's two workloads as traces
simulate.py    one simulated engine, and the replay over one or several
routing.py     what stands before several
"""
