#!/usr/bin/env bash
# The GPU benchmarks on one CUDA machine without a network, in BENCH_MINUTES (20). Needs a `python` with this package and its
# dependencies, aiohttp, matplotlib and pytest (scripts/wheelhouse.py collects them); models get dummy weights.
#
# The first questions come first, each for all models: aliased memory and hybrid prefilling right, longest input, hybrid
# overhead, WL1, WL2. A step that fails, or is cut off at its limit, loses its own rows only; one for which no time is left says so.
# Results and a report: $1/MODEL-BACKEND (default gpu-results/...). BENCH_BACKENDS="fa3 flashinfer triton" compares attention
# backends (default: the first of them that is here), BENCH_MODELS names configs of benchmarks/models, BENCH_USERS=20 runs WL1
# with all of its users.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
end=$((SECONDS + 60 * ${BENCH_MINUTES:-20}))
export BENCH_USERS=${BENCH_USERS:-3} BENCH_MODEL BENCH_ATTENTION_BACKEND PYTHONPATH=$PWD
models=${BENCH_MODELS:-llama-3.1-8b qwen-32b-fp8 llama-3.3-70b-fp8}
backends=${BENCH_BACKENDS:-$(python -c 'from benchmarks import shapes; print(shapes.attention_backends()[0])')}
mkdir -p "$out"
step() { # NAME SECONDS COMMAND...
    local left=$((end - SECONDS)) limit=$2
    [ "$left" -lt "$limit" ] && limit=$left
    echo "== $1: ${*:3}"
    if [ "$limit" -lt 60 ]; then echo "   not run: no time left"; return; fi
    timeout --kill-after 60 "$limit" "${@:3}" >"$out/$1.txt" 2>&1 && echo "   done" || echo "   ended with $?: see $out/$1.txt"
}
step correctness 240 python -m pytest -q tests/gpu
while read -r question limit; do
    for BENCH_MODEL in $models; do
        for BENCH_ATTENTION_BACKEND in $backends; do
            folder=$out/$BENCH_MODEL-$BENCH_ATTENTION_BACKEND/$question
            mkdir -p "$folder"
            step "$question-$BENCH_MODEL-$BENCH_ATTENTION_BACKEND" "$limit" \
                python "benchmarks/$question/run.py" --json "$folder/result.json" </dev/null
        done
    done
done <<QUESTIONS
mil 200
hybrid_overhead 120
post_recommendation 240
credit_verification 200
QUESTIONS
for folder in "$out"/*-*/; do
    python benchmarks/figures.py --folder "$folder" && python benchmarks/make_report.py --folder "$folder"
done
