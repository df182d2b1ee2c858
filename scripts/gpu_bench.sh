#!/usr/bin/env bash
# The GPU benchmarks on one CUDA machine without a network, some 20 minutes; a step that fails loses its own rows only.
# Results and a report: $1/MODEL-BACKEND (default gpu-results/...). BENCH_BACKENDS="fa3 flashinfer triton" compares attention
# backends, BENCH_MODELS names configs of benchmarks/models, BENCH_USERS=20 runs WL1 with all of its users.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
export BENCH_USERS=${BENCH_USERS:-6} BENCH_MODEL BENCH_ATTENTION_BACKEND
mkdir -p "$out"
step() { # NAME SECONDS COMMAND...
    echo "== $1: ${*:3}"
    timeout --kill-after 60 "$2" "${@:3}" >"$out/$1.txt" 2>&1 && echo "   done" || echo "   failed with $?: see $out/$1.txt"
}
step correctness 300 python -m pytest -q tests/gpu
for BENCH_MODEL in ${BENCH_MODELS:-llama-3.1-8b qwen-32b-fp8 llama-3.3-70b-fp8}; do
    for BENCH_ATTENTION_BACKEND in ${BENCH_BACKENDS:-fa3}; do
        folder=$BENCH_MODEL-$BENCH_ATTENTION_BACKEND
        for question in mil hybrid_overhead post_recommendation credit_verification; do
            mkdir -p "$out/$folder/$question"
            step "$question-$folder" 240 python "benchmarks/$question/run.py" --json "$out/$folder/$question/result.json"
        done
        python benchmarks/figures.py --folder "$out/$folder" && python benchmarks/make_report.py --folder "$out/$folder"
    done
done
