"""A trace replayed on a simulated clock through the policy, index and prefix cache of the engine.

workloads.py   the paper's two workloads, trace files and request logs as traces
simulate.py    one simulated engine, and the replay
summary.py     a row of numbers per replay, and the distribution of its latencies
"""
