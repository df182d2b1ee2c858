"""What comparison benchmarks share: engines as real servers, an open-loop client, and the figures of a run."""
