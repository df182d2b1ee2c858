#!/usr/bin/env bash
# The GPU benchmarks on one CUDA machine without a network, in parts of BENCH_MINUTES (9). Call it again to go on: what has ended is
# not run again, and what was cut off goes on. Needs a `python3` with this package and its dependencies, aiohttp, matplotlib and pytest
# (without an index: scripts/gpu_kit.py), and nvidia-smi; models get dummy weights.
#
# First single kernels are compared. Then what decides most, tests side by side: aliased memory and hybrid prefilling right, the
# parity gate real, graphs replayed for a hit, storm, smoke (tests/gpu); then of the first model what a step costs, WL1, the longest
# input, and other workloads, each alone; then the other backends and models. A step that fails, or is cut off three times at its own
# limit, loses its own rows only (benchmarks/gpu_steps.py has them all).
#
# Results: $1 (default gpu-results), and all of it in $1.tar.gz; outcomes in $1/steps.json.
# BENCH_BACKENDS="fa3 flashinfer triton": those of the device that are asked for, the first one everything (default: all it has);
# BENCH_MODELS names configs of benchmarks/models; BENCH_USERS=20 runs WL1 with all of its users; --again NAME runs a step again.
# BENCH_AT_ONCE=4: so many servers of the comparisons start side by side and take turns, on a card with room for their weights and
# KV pools; BENCH_COMMIT: which commit this is, where the tree was copied without its repository.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} BENCH_USERS=${BENCH_USERS:-3}
# Both engines: of DeepGEMM's kernels those of typical sizes, for which a start takes minutes instead of a quarter of an hour.
export SGLANG_JIT_DEEPGEMM_FAST_WARMUP=${SGLANG_JIT_DEEPGEMM_FAST_WARMUP:-1}
eval "$(python3 -m sgl_prefill.startup.examine)" # where there is no toolkit, the packages' own
exec python3 benchmarks/gpu_steps.py "${1:-gpu-results}" --minutes "${BENCH_MINUTES:-9}" "${@:2}"
