"""Is a job that is known ahead answered faster by `sgl_prefill.batch` than by sending its rows to a server?"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report, shapes
from benchmarks.batch import job as batch_job
from benchmarks.batch.workloads import MICRO, WITH_DECODE, Industry, Micro
from benchmarks.harness import client, engines
from benchmarks.harness.turns import Served, Servers

MODEL = "llama-small"
KV_TOKENS = 4000
TURNS, SERVERS_UP = 3, 7
Workload = Micro | Industry
SHUFFLED, SORTED = "shuffled", "sorted"
LOGS_STEPS = ("--decode-log-interval", "1")  # SGLang's log says what each step computes: `step_tokens`
CACHE = ("--context-length", "2560", "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", "64")
SERVED = Served(MODEL, [*CACHE, *LOGS_STEPS], ["--max-input-length", "2048", *shapes.budget(3)])
# A job is sent to one of these servers (`--base-url`), or has an engine of its own. Its engine's name is that of the server.
JOB = engines.OURS
ALONE = engines.ours("ours, each request attends alone", "--set", "shared_prefix_attention=off")
GENERATES = engines.ours("ours, with generation", "--allow-generation")
IN_PROCESS = engines.Engine("ours, in process", batch_job.MODULE)
AGAIN = engines.ours("ours, again")  # for the noise
JOBS = (JOB, ALONE, AGAIN, GENERATES, IN_PROCESS)
N_IN_PROCESS = 3  # workloads: each starts an engine
N_WARM_UP = 8  # requests to a server that has just started
POLICIES = tuple(engines.stock(policy) for policy in ("fcfs", "lpm", "dfs-weight", "shortest-prefill-first"))
# In bfloat16 log-probabilities near -13 differ by up to 0.6 and more between PyTorch's attention and the kernel's after 1,620
# tokens; each row says by how much, and which share of the answers this tells from those of another prompt.
MAX_LOGPROB_DIFFERENCE = 1.5 if shapes.DTYPE == "bfloat16" else engines.MAX_LOGPROB_DIFFERENCE
LOGGED_STEP = re.compile(r"Prefill batch.*#new-token: (\d+)|Decode batch.*#running-req: (\d+)")
PREFILL: tuple[Workload, ...] = (*MICRO, Industry(500, 10))
QUICK: tuple[Workload, ...] = (Micro(60, 10, 4, 24), Industry(24, 20))
QUICK_DECODE = (Micro(60, 10, 4, 24, n_new_tokens=4),)
ATTENTION_TURNS = 6


class Cell(NamedTuple):
    """One workload, and how its file is sorted."""

    workload: Workload
    file: str


class Ran(NamedTuple):
    """One workload on one engine."""

    rows_per_s: float
    cached_share: float  # of all prompt tokens
    logprobs: list[list[float]]  # in the order of the workload's rows


Measured = dict[engines.Engine, dict[Cell, list[Ran]]]


def measure(quick: bool) -> dict[str, Any]:
    """Rows of one prefill each, by every engine."""
    return of_all(QUICK if quick else PREFILL, (JOB, IN_PROCESS), quick)


def measure_decode(quick: bool) -> dict[str, Any]:
    """Rows with new tokens."""
    return of_all(QUICK_DECODE if quick else WITH_DECODE, (GENERATES,), quick)


def of_all(workloads: Sequence[Workload], jobs: Sequence[engines.Engine], quick: bool) -> dict[str, Any]:
    rivals = [policy.on(engines.NEW_KERNEL) for policy in (POLICIES[2:3] if quick else POLICIES)]
    with comparing() as comparison:
        comparison.turn(1, {engine: cells_of(engine, workloads) for engine in (*jobs, *rivals)})
        if not quick:
            slow = {engines.VLLM: cells_of(engines.VLLM, workloads)}  # and stock as installed: minutes a turn, so one
            comparison.turn(1, slow | fastest_as_installed(comparison.measured, workloads))
            for number in range(2, TURNS + 1):
                comparison.turn(number, finalists(comparison.measured, workloads, jobs))
        return comparison.part(targets_of(comparison.measured, workloads))


def measure_attention(quick: bool) -> dict[str, Any]:
    """With attention of shared prefixes and without it: the same job by servers that stay up, in turns whose order alternates."""
    workloads = QUICK if quick else PREFILL
    with comparing() as comparison:
        for number in range(1, 1 + (1 if quick else ATTENTION_TURNS)):
            for workload in workloads:
                for engine in (JOB, ALONE, AGAIN)[:: 1 if number % 2 else -1]:
                    comparison.turn(number, {engine: [Cell(workload, SHUFFLED)]})
        rates = {(row["engine"], row["workload"]): row["rows_per_s"] for row in comparison.medians()}
        targets = [
            report.Target.at_least(
                f"{one.name}: rows a second, shared attention / each alone",
                rates[JOB.name, one.name] / rates[ALONE.name, one.name],
                1.0,
            )
            for one in workloads
        ]
        return comparison.part(targets)


def cells_of(engine: engines.Engine, workloads: Sequence[Workload]) -> list[Cell]:
    """The cells in which an engine runs. Only rivals also run the sorted files: a job plans for itself."""
    files = (SHUFFLED,) if engine in JOBS else (SHUFFLED, SORTED)
    some = workloads[:N_IN_PROCESS] if engine == IN_PROCESS else workloads
    return [Cell(one, file) for one in some for file in files]


def finalists(
    measured: Measured, workloads: Sequence[Workload], jobs: Sequence[engines.Engine]
) -> dict[engines.Engine, list[Cell]]:
    """Ours, and for each workload and file the fastest rival with the new kernel."""
    wanted = {engine: cells_of(engine, workloads) for engine in jobs}
    for cell in (Cell(one, file) for one in workloads for file in (SHUFFLED, SORTED)):
        if (rival := fastest(measured, engines.NEW_KERNEL, cell)) is not None:
            wanted.setdefault(rival, []).append(cell)
    return wanted


def fastest_as_installed(measured: Measured, workloads: Sequence[Workload]) -> dict[engines.Engine, list[Cell]]:
    """For each shuffled file the policy that was the fastest with the kernel, attending as a user gets it."""
    wanted: dict[engines.Engine, list[Cell]] = {}
    as_installed = {policy.on(engines.NEW_KERNEL): policy.on(engines.AS_SHIPPED) for policy in POLICIES}
    for cell in (Cell(one, SHUFFLED) for one in workloads if not one.n_new_tokens):
        if (rival := fastest(measured, engines.NEW_KERNEL, cell)) is not None:
            wanted.setdefault(as_installed[rival], []).append(cell)
    return wanted


def fastest(measured: Measured, reference: engines.Reference, cell: Cell) -> engines.Engine | None:
    rivals = [one for one, cells in measured.items() if one.reference == reference and cell in cells]
    return max(rivals, key=lambda one: measured[one][cell][0].rows_per_s, default=None)


def largest_difference(answers: list[list[float]], others: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(answers, others, strict=True) for a, b in zip(one, other, strict=True))


@contextmanager
def comparing() -> Iterator[Comparison]:
    with tempfile.TemporaryDirectory() as folder, Servers(SERVED, SERVERS_UP) as servers:
        yield Comparison(servers, Path(folder))


class Comparison:
    """Runs cells on engines, and keeps what came of it."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._servers = servers
        self._job, self._output = folder / "job.jsonl", folder / "answers.jsonl"
        self._first: dict[Workload, Ran] = {}
        self._warm: set[int] = set()  # processes that have answered
        self.measured: Measured = {}
        self.rows: list[dict[str, Any]] = []
        self.failed: list[dict[str, str]] = []
        # By engine and workload: what each step computed, in the first turn.
        self.step_tokens: dict[str, list[int]] = {}
        self.conditions: dict[str, dict[str, Any]] = {"commands": {}, "kernel_of": {}, "sglang_of": {}}

    def turn(self, number: int, wanted: Mapping[engines.Engine, Iterable[Cell]]) -> None:
        """Measures each engine once. A rival that cannot be started, or ends, is named in `failed`."""
        for engine, cells in wanted.items():
            try:
                for cell in cells:
                    self._measure(number, engine, cell)
            except Exception as error:
                why = None if engine in JOBS else self._servers.why_failed(engine, error)
                if why is None:
                    raise
                self.failed.append({"engine": engine.name, "failed": why})

    def _measure(self, number: int, engine: engines.Engine, cell: Cell) -> None:
        rows = cell.workload.rows()
        if engine != IN_PROCESS:
            self._warm_up(engine, cell.workload)
        log, name = self._servers.log_of(engine), f"{engine.name}, {cell.workload.name}, {cell.file}"
        n_logged = len(log.read_text()) if log.exists() else 0
        ran = self._run_job(engine, cell.workload) if engine in JOBS else self._run_server(engine, cell)
        if cell.workload.n_new_tokens and log.exists():
            steps = LOGGED_STEP.findall(log.read_text()[n_logged:])
            self.step_tokens.setdefault(name, [int(prefilled or decoded) for prefilled, decoded in steps])
        first = self._first.setdefault(cell.workload, ran)
        client.check_agreement(ran.logprobs, first.logprobs, MAX_LOGPROB_DIFFERENCE, engine.name)
        self.measured.setdefault(engine, {}).setdefault(cell, []).append(ran)
        self.rows.append(
            {
                "engine": engine.name,
                "turn": number,
                "workload": cell.workload.name,
                "file": cell.file,
                "requests": len(rows),
                "rows_per_s": ran.rows_per_s,
                "cached_share": ran.cached_share,
                "largest_difference": largest_difference(ran.logprobs, first.logprobs),
                "told_apart": client.told_apart(ran.logprobs, MAX_LOGPROB_DIFFERENCE),
            }
        )

    def _warm_up(self, engine: engines.Engine, workload: Workload) -> None:
        server = self._servers.of(engine)
        if server.pid not in self._warm:
            some = workload.rows()[:N_WARM_UP]
            dues = [client.Due(0.0, row, n_new_tokens=workload.n_new_tokens) for row in some]
            client.run(server.url, dues, "warm-up", engine.dialect)
            self._warm.add(server.pid)

    def _run_server(self, engine: engines.Engine, cell: Cell) -> Ran:
        """Sends all rows at once, as a user with a batch file and a server would."""
        rows = cell.workload.rows()
        order = sorted(range(len(rows)), key=rows.__getitem__) if cell.file == SORTED else range(len(rows))
        server = self._empty_server(engine)
        dues = [client.Due(0.0, rows[row], n_new_tokens=cell.workload.n_new_tokens) for row in order]
        name = f"{engine.name}, {cell.workload.name}, {cell.file}"
        outcomes = client.run(server.url, dues, name, engine.dialect)
        figures = client.figures(outcomes)
        logprobs = dict(zip(order, (one.logprobs for one in outcomes), strict=True))
        return Ran(figures.requests_per_s, figures.cached_share, [logprobs[row] for row in range(len(rows))])

    def _empty_server(self, engine: engines.Engine) -> engines.Running:
        server = self._servers.of(engine)
        for name, value in (("commands", server.command), ("kernel_of", server.kernel), ("sglang_of", server.version)):
            self.conditions[name][engine.name] = value
        server.flush_cache()
        return server

    def _run_job(self, engine: engines.Engine, workload: Workload) -> Ran:
        """Its time is that from the first row read to the last answer on disk, without the start of an engine."""
        rows = workload.rows()
        if engine == IN_PROCESS:
            model = shapes.weight_flags(self._servers.model_folder, shapes.DTYPE)
            flags = [*model, *SERVED.flags_of_all, *SERVED.flags_of_ours]
            command = batch_job.command_of(self._job, self._output, flags)
            self.conditions["commands"][engine.name] = report.portable(command)
        else:
            flags = ["--base-url", self._empty_server(engine).url]
        batch_job.write(rows, self._job, workload.n_new_tokens)
        print(f"{engine.name}, {workload.name}: {len(rows)} rows")
        summary = batch_job.run(self._job, self._output, flags)
        logprobs = dict(batch_job.answers_of(self._output))
        taken_s = summary["plan_s"] + summary["answer_s"]
        cached_share = summary["cached_tokens"] / summary["prompt_tokens"]
        return Ran(len(rows) / taken_s, cached_share, [logprobs[row] for row in range(len(rows))])

    def part(self, targets: list[report.Target]) -> dict[str, Any]:
        conditions = {"model": MODEL, "kv_tokens": KV_TOKENS, "dtype": shapes.DTYPE, **self.conditions}
        found = {"medians": self.medians(), "failed": self.failed, "conditions": conditions}
        return report.part(self.rows, targets, **found, step_tokens=self.step_tokens)

    def medians(self) -> list[dict[str, Any]]:
        """Medians over the turns."""
        return [
            {
                "engine": engine.name,
                "workload": cell.workload.name,
                "file": cell.file,
                "turns": len(runs),
                "rows_per_s": statistics.median(run.rows_per_s for run in runs),
                "cached_share": statistics.median(run.cached_share for run in runs),
            }
            for engine, cells in self.measured.items()
            for cell, runs in cells.items()
        ]


def targets_of(measured: Measured, workloads: Sequence[Workload]) -> list[report.Target]:
    def rate(engine: engines.Engine, cell: Cell) -> float:
        return statistics.median(run.rows_per_s for run in measured[engine][cell])

    def best(rivals: Iterable[engines.Engine | None], cell: Cell) -> float:
        """Their highest rate; 0 where none was measured."""
        return max(
            (rate(one, cell) for one in rivals if one is not None and cell in measured.get(one, {})), default=0.0
        )

    at_least = report.Target.at_least
    targets = []
    for workload in workloads:
        shuffled, is_sorted = Cell(workload, SHUFFLED), Cell(workload, SORTED)
        ours = rate(GENERATES if workload.n_new_tokens else JOB, shuffled)
        what = f"{workload.name}: rows a second, job / "
        with_kernel = [best([fastest(measured, engines.NEW_KERNEL, cell)], cell) for cell in (shuffled, is_sorted)]
        as_installed = best([fastest(measured, engines.AS_SHIPPED, shuffled)], shuffled)
        vllm = max(best([engines.VLLM], cell) for cell in (shuffled, is_sorted))
        asked = [(vllm, "vLLM 0.32, better file", 2.0), (as_installed, "stock, torch_native, shuffled", 3.0)]
        if workload.n_new_tokens:
            asked = [asked[0], (max(with_kernel), "stock, new kernel, better file", 1.2)]
        else:
            asked += [
                (with_kernel[0], "stock, new kernel, shuffled", 1.5),
                (with_kernel[1], "stock, new kernel, sorted", 1.3),
            ]
            saved = min(run.cached_share for run in measured[JOB][shuffled])
            targets.append(at_least(f"{workload.name}: tokens saved / ceiling", saved / workload.ceiling, 0.999))
        targets += [at_least(f"{what}{name}", ours / rival, least) for rival, name, least in asked if rival]
    in_process = [cell for cell in measured.get(IN_PROCESS, {}) if cell in measured[JOB]]
    if in_process:
        took = {one: sum(cell.workload.n_rows / rate(one, cell) for cell in in_process) for one in (JOB, IN_PROCESS)}
        targets.append(at_least("--base-url / in process: rows a second", took[IN_PROCESS] / took[JOB], 0.95))
    return targets
