"""Is a job that is known ahead answered faster by `sgl_prefill.batch` than by sending its rows to a server?

    python benchmarks/batch_job/run.py [--quick] [--json PATH]

The paper's workloads, divided, against both versions of SGLang, as shuffled and as sorted files. See the README beside this.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import report, shapes
from benchmarks.batch_job import job as batch_job
from benchmarks.batch_job.workloads import MICRO, WITH_DECODE, Micro, Rows, industry
from benchmarks.batch_plan.single_level import single_level
from benchmarks.harness import client, engines
from benchmarks.harness.turns import Served, Servers
from sgl_prefill.core.batch.token_rows import TokenRows

MODEL = "llama-small"
KV_TOKENS = 4000
TURNS, SERVERS_UP = 3, 4
INDUSTRY_ROWS, INDUSTRY_DIVIDED_BY = 8_000, 4
SHUFFLED, SORTED = "shuffled", "sorted"

JOB = engines.Engine("batch job", batch_job.MODULE)
JOB_OVER_HTTP = engines.Engine("batch job, --base-url", batch_job.MODULE)
POLICIES = tuple(engines.stock(policy) for policy in ("fcfs", "lpm", "dfs-weight", "shortest-prefill-first"))
# In bfloat16 log-probabilities near -13 differ by up to 0.6 and more between PyTorch's attention and the kernel's after 1,620
# tokens; each row says by how much, and which share of the answers this tells from those of another prompt.
MAX_LOGPROB_DIFFERENCE = 1.5
QUICK = (Micro(60, 10, 4, 24), Micro(60, 10, 4, 24, n_new_tokens=4))


class Cell(NamedTuple):
    """One workload, and how its file is sorted."""

    workload: Micro
    file: str


class Ran(NamedTuple):
    """One workload on one engine."""

    rows_per_s: float
    cached_share: float  # of all prompt tokens
    logprobs: list[list[float]]  # in the order of the workload's rows


Measured = dict[engines.Engine, dict[Cell, list[Ran]]]


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions = report.conditions() | {"model": MODEL, "kv_tokens": KV_TOKENS}
    workloads = QUICK if arguments.quick else (*MICRO, *WITH_DECODE)
    policies = POLICIES[2:3] if arguments.quick else POLICIES
    served = Served(
        MODEL,
        ["--context-length", "4096", "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64"],
        ["--max-input-length", "2048", *shapes.budget(3)],
    )
    with tempfile.TemporaryDirectory() as folder, Servers(served, SERVERS_UP) as servers:
        comparison = Comparison(servers, served, Path(folder))
        everybody = (JOB, JOB_OVER_HTTP, *(policy.on(engines.NEW_KERNEL) for policy in policies))
        comparison.turn(1, {engine: cells_of(engine, workloads) for engine in everybody})
        if not arguments.quick:
            as_shipped = fastest_as_shipped(comparison.measured, policies, workloads)
            comparison.turn(1, as_shipped)
            for number in range(2, TURNS + 1):
                comparison.turn(number, finalists(comparison.measured, workloads) | as_shipped)
        of_industry = comparison.run_industry(400 if arguments.quick else INDUSTRY_ROWS)
    report.finish(
        {
            "conditions": conditions | comparison.conditions,
            "medians": comparison.medians(),
            "industry": of_industry,
            "failed": comparison.failed,
            "rows": comparison.rows,
        },
        targets_of(comparison.measured, workloads, of_industry),
        arguments.json,
    )
    return 0


def cells_of(engine: engines.Engine, workloads: Sequence[Micro]) -> list[Cell]:
    """The cells in which an engine runs. Only rivals with the new kernel also run the sorted files: a job plans for itself."""
    files = (SHUFFLED, SORTED) if engine.reference == engines.NEW_KERNEL else (SHUFFLED,)
    with_decode = engine == JOB or engine.reference == engines.NEW_KERNEL
    return [Cell(one, file) for one in workloads if with_decode or not one.n_new_tokens for file in files]


def finalists(measured: Measured, workloads: Sequence[Micro]) -> dict[engines.Engine, list[Cell]]:
    """Ours, and for each workload and file the fastest rival with the new kernel."""
    wanted = {engine: cells_of(engine, workloads) for engine in (JOB, JOB_OVER_HTTP)}
    for cell in (Cell(one, file) for one in workloads for file in (SHUFFLED, SORTED)):
        wanted.setdefault(fastest(measured, engines.NEW_KERNEL, cell), []).append(cell)
    return wanted


def fastest_as_shipped(
    measured: Measured, policies: Sequence[engines.Engine], workloads: Sequence[Micro]
) -> dict[engines.Engine, list[Cell]]:
    """For each shuffled file the policy that was the fastest with the kernel, attending as a user gets it."""
    wanted: dict[engines.Engine, list[Cell]] = {}
    as_shipped = {policy.on(engines.NEW_KERNEL): policy.on(engines.AS_SHIPPED) for policy in policies}
    for cell in (Cell(one, SHUFFLED) for one in workloads if not one.n_new_tokens):
        wanted.setdefault(as_shipped[fastest(measured, engines.NEW_KERNEL, cell)], []).append(cell)
    return wanted


def fastest(measured: Measured, reference: engines.Reference, cell: Cell) -> engines.Engine:
    rivals = [one for one, cells in measured.items() if one.reference == reference and cell in cells]
    return max(rivals, key=lambda one: measured[one][cell][0].rows_per_s)


def largest_difference(answers: list[list[float]], others: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(answers, others, strict=True) for a, b in zip(one, other, strict=True))


class Comparison:
    """Runs cells on engines, and keeps what came of it."""

    def __init__(self, servers: Servers, served: Served, folder: Path) -> None:
        self._servers, self._served = servers, served
        self._job, self._output = folder / "job.jsonl", folder / "answers.jsonl"
        self._first: dict[Micro, Ran] = {}
        self.measured: Measured = {}
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, str]] = []
        self.conditions: dict[str, dict[str, Any]] = {"commands": {}, "kernel_of": {}, "sglang_of": {}}

    def turn(self, number: int, wanted: Mapping[engines.Engine, Iterable[Cell]]) -> None:
        """Measures each engine once. A rival that cannot be started, or ends, is named in `failed`."""
        for engine, cells in wanted.items():
            try:
                for cell in cells:
                    self._measure(number, engine, cell)
            except Exception as error:
                why = self._servers.why_failed(engine, error)
                if why is None or engine.reference is None:
                    raise
                self.failed.append({"engine": engine.name, "failed": why})

    def _measure(self, number: int, engine: engines.Engine, cell: Cell) -> None:
        rows = cell.workload.rows()
        if engine in (JOB, JOB_OVER_HTTP):
            ran = self._run_job(engine, rows, cell.workload.n_new_tokens)
        else:
            ran = self._run_server(engine, rows, cell)
        first = self._first.setdefault(cell.workload, ran)
        client.check_agreement(ran.logprobs, first.logprobs, MAX_LOGPROB_DIFFERENCE, engine.name)
        self.measured.setdefault(engine, {}).setdefault(cell, []).append(ran)
        self.rows.append(
            {
                "engine": engine.name,
                "turn": number,
                "workload": cell.workload.name,
                "file": cell.file,
                "rows_per_s": ran.rows_per_s,
                "cached_share": ran.cached_share,
                "largest_difference": largest_difference(ran.logprobs, first.logprobs),
                "told_apart": client.told_apart(ran.logprobs, MAX_LOGPROB_DIFFERENCE),
            }
        )

    def _run_server(self, engine: engines.Engine, rows: Rows, cell: Cell) -> Ran:
        """Sends all rows at once, as a user with a batch file and a server would."""
        order = sorted(range(len(rows)), key=rows.__getitem__) if cell.file == SORTED else range(len(rows))
        server = self._empty_server(engine)
        dues = [client.Due(0.0, rows[row], n_new_tokens=cell.workload.n_new_tokens) for row in order]
        outcomes = client.run(server.url, dues, f"{engine.name}, {cell.workload.name}, {cell.file}")
        figures = client.figures(outcomes)
        logprobs = dict(zip(order, (one.logprobs for one in outcomes), strict=True))
        return Ran(figures.requests_per_s, figures.cached_share, [logprobs[row] for row in range(len(rows))])

    def _empty_server(self, engine: engines.Engine) -> engines.Running:
        server = self._servers.of(engine)
        for name, value in (("commands", server.command), ("kernel_of", server.kernel), ("sglang_of", server.version)):
            self.conditions[name][engine.name] = value
        server.flush_cache()
        return server

    def medians(self) -> list[dict[str, Any]]:
        """Medians of the engines that ran in all turns."""
        n_turns = max(len(runs) for cells in self.measured.values() for runs in cells.values())
        return [
            {
                "engine": engine.name,
                "workload": cell.workload.name,
                "file": cell.file,
                "rows_per_s": statistics.median(run.rows_per_s for run in runs),
                "cached_share": statistics.median(run.cached_share for run in runs),
            }
            for engine, cells in self.measured.items()
            for cell, runs in cells.items()
            if len(runs) == n_turns
        ]

    def _run_job(self, engine: engines.Engine, rows: Rows, n_new_tokens: int) -> Ran:
        ran, _ = self._run_job_with_summary(engine, rows, n_new_tokens)
        return ran

    def _run_job_with_summary(
        self, engine: engines.Engine, rows: Rows, n_new_tokens: int = 0
    ) -> tuple[Ran, dict[str, Any]]:
        """Its time is that from the first row read to the last answer on disk, without the start of the engine, as a server's
        start does not count either."""
        if engine == JOB:
            flags = [
                *shapes.weight_flags(self._servers.model_folder, shapes.DTYPE),
                *self._served.flags_of_all,
                *self._served.flags_of_ours,
                *(["--allow-generation"] if n_new_tokens else []),
            ]
        else:
            flags = ["--base-url", self._empty_server(engines.OURS).url]
        batch_job.write(rows, self._job, n_new_tokens)
        print(f"{engine.name}: {len(rows)} rows", file=sys.stderr)
        summary = batch_job.run(self._job, self._output, flags)
        self.conditions["commands"][engine.name] = report.portable(batch_job.command_of(self._job, self._output, flags))
        logprobs = dict(batch_job.answers_of(self._output))
        taken_s = summary["plan_s"] + summary["answer_s"]
        cached_share = summary["cached_tokens"] / summary["prompt_tokens"]
        return Ran(len(rows) / taken_s, cached_share, [logprobs[row] for row in range(len(rows))]), summary

    def run_industry(self, n_rows: int) -> dict[str, Any]:
        """Ours alone: how much of what could be saved is, and what groups of one level would save."""
        rows = industry(n_rows, INDUSTRY_DIVIDED_BY)
        ran, summary = self._run_job_with_summary(JOB, rows)
        tokens = TokenRows.of(rows)
        return {
            "rows": n_rows,
            "tokens": summary["prompt_tokens"],
            "saved": ran.cached_share,
            "ceiling": summary["tokens_saved_at_most"] / summary["prompt_tokens"],
            "one_level_saves": single_level(tokens).saved_tokens / summary["prompt_tokens"],
            "plan_s": summary["plan_s"],
            "answer_s": summary["answer_s"],
            "rows_per_s": ran.rows_per_s,
        }


def targets_of(measured: Measured, workloads: Sequence[Micro], of_industry: Mapping[str, Any]) -> list[report.Target]:
    def rate(engine: engines.Engine, cell: Cell) -> float:
        return statistics.median(run.rows_per_s for run in measured[engine][cell])

    def best_rate(reference: engines.Reference, *cells: Cell) -> float | None:
        rates = [
            rate(fastest(measured, reference, cell), cell)
            for cell in cells
            if any(one.reference == reference and cell in found for one, found in measured.items())
        ]
        return max(rates, default=None)

    at_least = report.Target.at_least
    targets = []
    prefill_only = [one for one in workloads if not one.n_new_tokens]
    for workload in workloads:
        shuffled, is_sorted = Cell(workload, SHUFFLED), Cell(workload, SORTED)
        ours = rate(JOB, shuffled)
        what = f"{workload.name}: rows a second, batch job / best of stock"
        if workload.n_new_tokens:
            if (rival := best_rate(engines.NEW_KERNEL, shuffled, is_sorted)) is not None:
                targets.append(at_least(f"{what}, new kernel, better of both files", ours / rival, 1.2))
            continue
        saved = min(run.cached_share for run in measured[JOB][shuffled])
        targets.append(at_least(f"{workload.name}: tokens saved / ceiling", saved / workload.ceiling, 0.999))
        for reference, cell, limit in (
            (engines.AS_SHIPPED, shuffled, 3.0),
            (engines.NEW_KERNEL, shuffled, 1.5),
            (engines.NEW_KERNEL, is_sorted, 1.3),
        ):
            if (rival := best_rate(reference, cell)) is not None:
                targets.append(at_least(f"{what}, {reference.name}, file {cell.file}", ours / rival, limit))

    def total_s(engine: engines.Engine) -> float:
        return sum(one.n_rows / rate(engine, Cell(one, SHUFFLED)) for one in prefill_only)

    def saved_in_all(engine: engines.Engine) -> float:
        return sum(measured[engine][Cell(one, SHUFFLED)][0].cached_share for one in prefill_only)

    ceiling, one_level = of_industry["ceiling"], of_industry["one_level_saves"]
    return [
        *targets,
        at_least("--base-url / in process: tokens saved", saved_in_all(JOB_OVER_HTTP) / saved_in_all(JOB), 0.95),
        at_least("--base-url / in process: speed over all workloads", total_s(JOB) / total_s(JOB_OVER_HTTP), 0.95),
        at_least("industry workload: tokens saved / ceiling", of_industry["saved"] / ceiling, 0.999),
        report.Target.at_most("industry workload: share that one level saves less", ceiling - one_level, 0.01),
    ]


if __name__ == "__main__":
    sys.exit(main())
