#!/usr/bin/env bash
# Pictures of /dashboard, light and dark, under load: into the folder that is named, or beside the page's README. Needs Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh test,bench
exec .venv/bin/python benchmarks/dashboard/screenshots.py "$@"
