"""What else a user might pick on a CPU, behind the part of SGLang's HTTP interface that the benchmarks use."""
