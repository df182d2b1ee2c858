#!/usr/bin/env bash
# Run the tests, setting up .venv first if it is missing. `--all` runs the rare ones too (tests/selection.py); other arguments
# go to pytest, e.g. `scripts/test.sh tests/cpu`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh test,bench
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
if [[ $# -gt 0 && "$*" != --all ]]; then exec .venv/bin/python -m pytest "$@"; fi
OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@" -n 2 --dist loadfile tests/core tests/cpu
.venv/bin/python -m pytest "$@" tests/integration tests/gpu
