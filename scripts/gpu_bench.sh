#!/bin/sh
# All benchmarks on one CUDA machine without a network; a step that fails loses its own rows. Results: $1 (default: gpu-results).
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
mkdir -p "$out"
step() { # NAME COMMAND...
    name=$1; shift
    echo "== $name: $*"
    if timeout "${STEP_TIMEOUT_S:-300}" "$@" >"$out/$name.txt" 2>&1; then echo "   done"; else echo "   failed with $?: see $out/$name.txt"; fi
}
step correctness python -m pytest -q tests/gpu
for question in mil hybrid_overhead post_recommendation credit_verification short_mix long_among_short; do
    step "$question" python "benchmarks/$question/run.py" --json "$out/$question.json"
done
