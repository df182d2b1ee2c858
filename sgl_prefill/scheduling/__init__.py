"""What a live engine does around a policy: who has come, what the running step was predicted to take, what it took, metrics."""
