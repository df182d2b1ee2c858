#!/usr/bin/env bash
# Run the tests, setting up .venv first if it is missing. Arguments go to pytest, e.g. `scripts/test.sh tests/cpu`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
exec .venv/bin/python -m pytest "$@"
