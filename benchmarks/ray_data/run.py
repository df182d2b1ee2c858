"""Do two actors answer a dataset twice as fast as one, without computing more, and whatever happens to them?

    python benchmarks/ray_data/run.py [--quick] [--json PATH]

See the README beside this.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])  # of Ray's processes

import psutil
import ray
from ray.data import ActorPoolStrategy

from benchmarks import report, shapes
from benchmarks.batch.workloads import Micro
from sgl_prefill.batch.asked import Asked
from sgl_prefill.batch.options import INFLIGHT_OWN_ENGINE
from sgl_prefill.ray import scorer

MODEL = "llama-small"
KV_TOKENS = 4000
LABELS = (" t5", " t6", " t7")
N_ROWS, TURNS, KILLS = 5_000, 3, 3
PLAIN_ROWS = 256  # of a batch of a plain `map_batches`
POLL_S = 0.05
# In bfloat16 steps of other rows move probabilities so much.
MOST_DIFFERENT = 0.05

Rows = list[dict[str, Any]]


class Ran(NamedTuple):
    """What came of one job."""

    plan_s: float
    answer_s: float  # from the moment at which all engines were there to the last answer
    cached_share: float
    rows: Rows
    kills: int = 0


class Gate:
    """Opens when all engines are there: how long they start is not what is measured."""

    def __init__(self, n_actors: int) -> None:
        self._n_left = n_actors

    def came(self) -> None:
        self._n_left -= 1

    def is_open(self) -> bool:
        return self._n_left <= 0


class Timed(scorer.Scorer):
    """Says of each row when its unit was begun and ended."""

    def __init__(self, arguments: scorer.Arguments, known: Any, gate: Any) -> None:
        super().__init__(arguments, known)
        ray.get(gate.came.remote())
        while not ray.get(gate.is_open.remote()):
            time.sleep(POLL_S)

    def __call__(self, rows: Any) -> Any:
        began_s = time.time()
        answered = super().__call__(rows)
        for name, value in (("began_s", began_s), ("ended_s", time.time())):
            answered = answered.append_column(name, [[value] * rows.num_rows])
        return answered


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    conditions = report.conditions() | {"model": MODEL, "kv_tokens": KV_TOKENS, "threads": 1, "ray": ray.__version__}
    n_rows, n_turns, n_kills = (320, 1, 1) if arguments.quick else (N_ROWS, TURNS, KILLS)
    rows = [
        {"id": number, "prompt": " ".join(f"t{token}" for token in row)}
        for number, row in enumerate(Micro(200, 20, 16, n_rows).rows())
    ]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=500 << 20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        with tempfile.TemporaryDirectory() as name:
            shapes.write_weights(shapes.write(MODEL, Path(name)))
            jobs = Jobs(rows, Path(name))
            turns = [(jobs.planned(1), jobs.planned(2)) for _ in range(n_turns)]
            whole, plain = jobs.plain(1, None), jobs.plain(2, PLAIN_ROWS)
            killed = jobs.planned(2, n_kills)
    finally:
        ray.shutdown()
    finish(conditions, turns, whole, plain, killed, arguments.json)
    return 0


class Jobs:
    """The same rows, answered in several ways."""

    def __init__(self, rows: Rows, folder: Path) -> None:
        self._rows, self._first = rows, dict[int, Any]()
        self._engine = {
            "model_path": str(folder),
            "dtype": shapes.DTYPE,
            "context_length": 4096,
            "max_total_tokens": KV_TOKENS,
            "max_input_length": 2048,
            "memory_budget_gb": 1.5,
        }

    def planned(self, n_actors: int, n_kills: int = 0) -> Ran:
        """As `sgl_prefill.ray.score` does it."""
        began_s = time.monotonic()
        units = scorer.units_of(self._dataset(3), scorer.Prompt(column="prompt"), n_actors)
        plan_s = time.monotonic() - began_s
        gate = ray.remote(num_cpus=0)(Gate).remote(n_actors)
        known = ray.remote(num_cpus=0)(scorer.Register).remote()
        scored = self._answered(units, n_actors, None, (gate, known))
        found: Rows = []
        kills = 0
        for batch in scored.iter_batches(batch_size=None, batch_format="pyarrow"):
            found += batch.to_pylist()
            if kills < n_kills and len(found) >= (kills + 1) * len(self._rows) / (n_kills + 2):
                os.kill(min(pids_of_actors()), signal.SIGKILL)
                kills += 1
        return self._checked(found, plan_s, f"planned, {n_actors} actors, {kills} kills", kills)

    def plain(self, n_actors: int, n_rows: int | None) -> Ran:
        """As a user of Ray Data would write it: batches of shuffled rows; None: all rows at once."""
        with_prompts = self._dataset(1 if n_rows is None else 20).map_batches(
            scorer.Prompt(column="prompt"), batch_format="pyarrow"
        )
        gate = ray.remote(num_cpus=0)(Gate).remote(n_actors)
        known = ray.remote(num_cpus=0)(scorer.Register).remote()
        scored = self._answered(with_prompts, n_actors, n_rows, (gate, known))
        return self._checked(scored.take_all(), 0.0, f"plain, {n_actors} actors, batches of {n_rows}", 0)

    def _dataset(self, n_blocks: int) -> Any:
        return ray.data.from_items(self._rows, override_num_blocks=n_blocks)

    def _answered(self, dataset: Any, n_actors: int, n_rows: int | None, actors: tuple[Any, Any]) -> Any:
        gate, known = actors
        told = scorer.Arguments(Asked(LABELS), self._engine, (), INFLIGHT_OWN_ENGINE, True, n_actors, 1)
        return dataset.map_batches(
            Timed,
            fn_constructor_args=(told, known, gate),
            batch_size=n_rows,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=n_actors, max_tasks_in_flight_per_actor=1, enable_true_multi_threading=True),
            num_cpus=0,
        )

    def _checked(self, found: Rows, plan_s: float, name: str, kills: int) -> Ran:
        """Raises InvalidRunError where a row failed, or was answered otherwise than before."""
        if failed := [row["error"] for row in found if row["error"] is not None]:
            raise report.InvalidRunError(f"{name}: {len(failed)} rows failed, the first with {failed[0]}")
        for row in found:
            first = self._first.setdefault(row["id"], row)
            if (difference := max(abs(row[label] - first[label]) for label in LABELS)) > MOST_DIFFERENT:
                raise report.InvalidRunError(
                    f"{name}: row {row['id']} differs by {difference:.3f} from its first answer"
                )
        answer_s = max(row["ended_s"] for row in found) - min(row["began_s"] for row in found)
        cached = sum(row[scorer.USAGE[1]] for row in found) / sum(row[scorer.USAGE[0]] for row in found)
        print(f"{name}: {answer_s:.1f} s, cached {cached:.4f}", file=sys.stderr)
        return Ran(plan_s, answer_s, cached, found, kills)


def pids_of_actors() -> list[int]:
    return [
        one.pid for one in psutil.process_iter(["cmdline"]) if "MapBatches(Timed)" in "".join(one.info["cmdline"] or ())
    ]


def finish(
    conditions: dict[str, Any], turns: list[tuple[Ran, Ran]], whole: Ran, plain: Ran, killed: Ran, path: Path | None
) -> None:
    n_rows = len(whole.rows)
    answered = [row["id"] for row in killed.rows]
    one_s, two_s = (statistics.median(ran.answer_s for ran in runs) for runs in zip(*turns, strict=True))
    with_plan = [statistics.median(ran.plan_s + ran.answer_s for ran in runs) for runs in zip(*turns, strict=True)]
    least_cached = min(two.cached_share for _, two in turns)
    targets = [
        report.Target.at_least("rows a second, 2 actors of 1 thread / 1 actor of 1 thread", one_s / two_s, 1.8),
        report.Target.at_most(
            "cached share, one engine on the whole file less 2 actors", whole.cached_share - least_cached, 0.01
        ),
        report.Target.at_most("kills of an actor: rows lost", n_rows - len(set(answered)), 0),
        report.Target.at_most("kills of an actor: rows answered twice", len(answered) - len(set(answered)), 0),
    ]
    named = [("1 actor", one) for one, _ in turns] + [("2 actors", two) for _, two in turns]
    named += [("1 engine, all rows at once", whole), (f"2 actors, plain map_batches of {PLAIN_ROWS} rows", plain)]
    named += [("2 actors, killed", killed)]
    report.finish(
        {
            "conditions": conditions,
            "rows": [
                {
                    "job": name,
                    "rows_per_s": round(n_rows / ran.answer_s, 2),
                    "plan_s": round(ran.plan_s, 2),
                    "answer_s": round(ran.answer_s, 2),
                    "cached_share": round(ran.cached_share, 4),
                    "kills": ran.kills,
                }
                for name, ran in named
            ],
            "speedup_with_plan": round(with_plan[0] / with_plan[1], 3),
        },
        targets,
        path,
    )


if __name__ == "__main__":
    sys.exit(main())
