#!/usr/bin/env bash
# Run the tests, setting up .venv first if it is missing. Arguments go to pytest, e.g. `scripts/test.sh tests/cpu`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
.venv/bin/python -m pytest "$@"
# Where the native kernels are not there, PyTorch's serve: the CPU tests once more on that path.
if [ $# -eq 0 ]; then PREFILL_CPU_KERNEL=off .venv/bin/python -m pytest -q tests/cpu; fi
