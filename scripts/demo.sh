#!/usr/bin/env bash
# From nothing to 24 labelled reviews: set up, fetch the demo model, start a server, label, stop it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh
exec .venv/bin/python -m sgl_prefill.examples.demo "$@"
