#!/usr/bin/env bash
# Set up .venv beside this folder if it is missing or older than pyproject.toml or setup.py, and the native kernels where they
# are older than their sources. Needs Python 3.11 or 3.12 with venv. `scripts/install.sh test,bench`: with these extras.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:+[$1]}
done_mark=.venv/.sgl_prefill_installed$extras
if ! cat pyproject.toml setup.py | cmp -s - "$done_mark"; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else
        f"Python {v[0]}.{v[1]} found, and 3.11 or 3.12 is needed: name one in the variable PYTHON")'
    echo "setting up .venv (9.7 GB; about a minute with a near registry)" >&2
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
    .venv/bin/uv pip install --quiet --python .venv/bin/python -e ".$extras"
    cat pyproject.toml setup.py | tee .venv/.sgl_prefill_installed >"$done_mark"
fi
.venv/bin/python sgl_prefill/cpu/native/build.py --if-needed || true # without a compiler PyTorch's kernels serve
