#!/usr/bin/env bash
# Lint, format and types.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh test,bench
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
