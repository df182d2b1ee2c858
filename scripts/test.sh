#!/usr/bin/env bash
# Run the tests, setting up .venv first if it is missing. `--all` runs the rare ones too (tests/selection.py); other arguments
# go to pytest, e.g. `scripts/test.sh tests/cpu`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh test,bench
clients=tests/clients/requirements.txt # of other projects, whose pins SGLang's exclude
if ! cmp -s "$clients" .venv-clients/.installed; then
    .venv/bin/uv venv --quiet --clear --python .venv/bin/python .venv-clients
    .venv/bin/uv pip install --quiet --python .venv-clients/bin/python --override tests/clients/overrides.txt -r "$clients"
    cp "$clients" .venv-clients/.installed
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
if [[ $# -gt 0 && "$*" != --all ]]; then exec .venv/bin/python -m pytest "$@"; fi
OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@" -n 2 --dist loadfile tests/core tests/cpu
.venv/bin/python -m pytest "$@" --durations 8 tests/integration tests/gpu
