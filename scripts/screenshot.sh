#!/usr/bin/env bash
# A picture of the queue on /dashboard under load: into the file that is named, or beside the page's README. Needs Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh test,bench
exec .venv/bin/python benchmarks/dashboard/screenshot.py "$@"
