"""Which tests run by default, and how long each file should take.

`RARE` maps long or rarely useful tests to the paths that they cover. A run without `--all` includes one only where a covered
file, or the test's own file, changed (`changed_files`), or where the command line names it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SINCE = "TESTS_SINCE"  # environment variable: the git reference to compare with

BATCH, CLUSTER, RAY = "sgl_prefill/batch", "sgl_prefill/cluster", "sgl_prefill/ray"
RANKS = (
    "sgl_prefill/core/ranks.py",
    "sgl_prefill/cpu/rank_threads.py",
    "sgl_prefill/port/runner/rank_group.py",
    "sgl_prefill/entry/processes.py",
)
GPU_KERNELS = (
    "sgl_prefill/gpu",
    "sgl_prefill/port/runner/shared_prefix_attention.py",
    "sgl_prefill/port/runner/shared_prefix_fa3.py",
)
INTERPRETED = "tests/cpu/test_shared_prefix_attention.py"
TENSOR_PARALLEL = "tests/integration/test_tensor_parallel.py"
# Test file, or `FILE::TEST` -> files and folders that it covers.
RARE: dict[str, tuple[str, ...]] = {
    "tests/cpu/test_compare_sglang.py": ("scripts/compare_sglang.py", "sgl_prefill/entry/hooks.py"),
    "tests/cpu/test_comparison.py": (
        "benchmarks/claims.py",
        "benchmarks/harness",
        "benchmarks/report.py",
        "benchmarks/make_report.py",
    ),
    "tests/cpu/test_device_paths.py::test_triton_finds_the_rows_of_the_longest_inputs": (
        "pyproject.toml",
        "tests/cpu/far_rows_child.py",
    ),
    "tests/cpu/test_gpu_bench.py": ("benchmarks/gpu_steps.py", "benchmarks/gpu_hits", "scripts/gpu_bench.sh"),
    "tests/cpu/test_harness.py": ("benchmarks/harness",),
    "tests/cpu/test_kernel_build.py": ("sgl_prefill/cpu/native", "scripts/install.sh", "setup.py"),
    "tests/cpu/test_patches.py": ("patches", "pyproject.toml"),
    f"{INTERPRETED}::test_sglangs_triton_kernels_compute_the_two_parts": (
        *GPU_KERNELS,
        "tests/cpu/shared_prefix_child.py",
    ),
    f"{INTERPRETED}::test_the_calls_of_flash_attention_3_are_the_attention_of_each_request": (
        *GPU_KERNELS,
        "tests/cpu/shared_prefix_child.py",
    ),
    "tests/cpu/test_gpu_kit.py": ("scripts/gpu_kit.py", "scripts/gpu_setup.sh"),
    "tests/integration/test_batch.py::test_a_dry_run_tells_what_the_job_costs_and_leaves_nothing": (BATCH,),
    "tests/integration/test_batch.py::test_the_reviews_of_the_readme_are_scored_right": (BATCH, "sgl_prefill/examples"),
    "tests/integration/test_benchmarks.py": ("benchmarks/harness", "benchmarks/storm"),
    "tests/integration/test_cluster.py": (CLUSTER,),
    "tests/integration/test_decision_checkpoints.py": (
        "sgl_prefill/http/decision_checkpoints.py",
        "tests/support/decision_models.py",
    ),
    "tests/integration/test_dashboard.py": ("sgl_prefill/dashboard", "tests/support/dashboard_server.py"),
    "tests/integration/test_families.py::test_every_other_family_is_right": (
        "benchmarks/families",
        "sgl_prefill/port/runner/model_faults.py",
        "sgl_prefill/startup/techniques.py",
        "tests/integration/families_child.py",
        "tests/support/families.py",
    ),
    "tests/integration/test_numerics.py::test_the_reference_is_what_transformers_says": (
        "tests/integration/prompts.py",
        "tests/integration/transformers_reference.json",
    ),
    "tests/integration/test_ray.py": (RAY, BATCH),
    f"{TENSOR_PARALLEL}::test_both_ranks_run_a_thousand_requests_in_one_order": RANKS,
    f"{TENSOR_PARALLEL}::test_a_killed_rank_ends_the_server": RANKS,
}

# Seconds that a file takes on 2 cores, where that is more than LEAST_BUDGET_S; servers that it starts included.
LEAST_BUDGET_S = 30.0
BUDGET_FACTOR = 3.0  # a file that takes so many times its budget is named at the end of the run
BUDGETS_S: dict[str, float] = {
    "tests/cpu/test_native.py": 75,
    "tests/cpu/test_shared_prefix_attention.py": 90,
    "tests/cpu/test_stable.py": 50,
    "tests/integration/test_bad_input.py": 60,
    "tests/integration/test_batch.py": 120,
    "tests/integration/test_benchmarks.py": 180,
    "tests/integration/test_cluster.py": 180,
    "tests/integration/test_dashboard.py": 90,
    "tests/integration/test_decision_checkpoints.py": 180,
    "tests/integration/test_examples.py": 70,
    "tests/integration/test_families.py": 120,
    "tests/integration/test_lifecycle.py": 60,
    "tests/integration/test_order.py": 60,
    "tests/integration/test_ray.py": 120,
    "tests/integration/test_stock.py": 60,
    "tests/integration/test_tenants.py": 45,
    "tests/integration/test_tensor_parallel.py": 60,
}


def changed_files() -> set[str]:
    """Paths that differ from the reference commit, uncommitted changes included; empty where git cannot say.

    The reference: $TESTS_SINCE, else the merge base with origin/main, else, where HEAD is on origin/main (a clone of it), HEAD's
    first parent, so that a merge commit stands for all that it merged.
    """
    reference = os.environ.get(SINCE)
    if reference is None:
        base = _git("merge-base", "HEAD", "origin/main")
        reference = "HEAD^" if not base or base == _git("rev-parse", "HEAD") else base[0]
    return {*_git("diff", "--name-only", reference), *_git("ls-files", "--others", "--exclude-standard")}


def left_out(changed: Iterable[str]) -> set[str]:
    """The entries of `RARE` that no changed file calls for."""
    found = set(changed)
    return {test for test, covers in RARE.items() if not any(_covers(test, covers, path) for path in found)}


def _covers(test: str, covers: tuple[str, ...], path: str) -> bool:
    return path == test.partition("::")[0] or any(path == one or path.startswith(f"{one}/") for one in covers)


def over_budget(seconds: dict[str, float]) -> list[str]:
    """A sentence for each file that took too long."""
    sentences = []
    for file, took_s in sorted(seconds.items()):
        budget_s = max(BUDGETS_S.get(file, 0.0), LEAST_BUDGET_S)
        limit_s = BUDGET_FACTOR * budget_s
        if took_s > limit_s:
            sentences.append(
                f"{file} took {took_s:.0f} s; its budget is {budget_s:.0f} s and the limit {limit_s:.0f} s. Make it faster, or"
                " raise its budget in tests/selection.py."
            )
    return sentences


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []
