"""The engine-free core: policy, job-completion-time models and label arithmetic. Imports neither torch nor sglang."""
