"""Is this checkout as fast as another one? Single steps, the policy's cost, guard, WL1 and decisions, in turns; longest inputs.

    BEFORE=FOLDER python benchmarks/two_commits/run.py [--quick] [--json PATH]

FOLDER is a checkout of another commit with its kernels built; where it needs another release of SGLang, BEFORE_PYTHON names
the Python of its environment. See the README beside this file.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests

from benchmarks import report
from benchmarks.harness import client, engines
from benchmarks.harness.turns import Served
from benchmarks.rivals import workloads as rivals
from benchmarks.step_profile.run import WORKS
from sgl_prefill.examples import demo_model

TURNS, SERVER_TURNS = 3, 9  # a turn of a server takes seconds, and one slow turn of three was the median's
REQUESTS = {"guard": (100, 10), "WL1": (5, 1)}  # of the works of step_profile, or users; with --quick
N_DECISIONS, STATE_TOKENS, QUESTIONS = 20, 600, 8
MOST = 1.05  # time now over time before; medians of turns
LEAST = 0.97  # longest input now over before


BEFORE_PYTHON = "BEFORE_PYTHON"


class Work(NamedTuple):
    """What is sent at once to a server of each tree."""

    name: str
    served: Served
    n_requests: int
    send: Callable[[str], Any]  # to the server at this address, until all is answered


class Tree(NamedTuple):
    name: str
    folder: Path
    python_variable: str | None = None  # of the environment, naming its Python; None: this one

    @property
    def python(self) -> str:
        return sys.executable if self.python_variable is None else os.environ[self.python_variable]

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder)}

    @property
    def commit(self) -> str:
        head = ["git", "-C", str(self.folder), "rev-parse", "HEAD"]
        return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()


def both_trees() -> tuple[Tree, Tree]:
    if (before := os.environ.get("BEFORE")) is None:
        raise report.InvalidRunError("BEFORE names no checkout to compare with: set it to the folder of one")
    python_variable = BEFORE_PYTHON if BEFORE_PYTHON in os.environ else None
    return Tree("before", Path(before).resolve(), python_variable), Tree("now", report.REPOSITORY)


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    trees = both_trees()
    conditions = {**report.conditions(), "before": trees[0].commit}
    n_turns = 1 if arguments.quick else TURNS
    rows = [*in_processes(trees, n_turns, arguments.quick)]
    rows += on_servers(trees, 1 if arguments.quick else SERVER_TURNS, arguments.quick)
    longest = [row for row in rows if "longest_input_tokens" in row]
    medians = medians_of([row for row in rows if "ms" in row])
    found = {"conditions": conditions, "medians": medians, "longest": longest, "rows": rows}
    report.finish(found, [*targets_of(medians), *longest_of(longest)], arguments.json)
    return 0


def in_processes(trees: tuple[Tree, ...], n_turns: int, is_quick: bool) -> Iterable[dict[str, Any]]:
    """Yields rows of single steps and of the policy's cost, by each tree's own scripts."""
    quick = ["--quick"] if is_quick else []
    for turn in range(1, n_turns + 1):
        for tree in trees:
            steps = lines_of(tree, tree.folder / "benchmarks/step_profile/steps.py", quick)[-1]
            for row in json.loads(steps)["rows"]:
                yield shown({"what": f"step, {row['step']}", "tree": tree.name, "turn": turn, "ms": row["ms"]})
            for line in lines_of(tree, Path(__file__).with_name("policy.py"), quick):
                if line.startswith("{"):
                    yield shown({**json.loads(line), "tree": tree.name, "turn": turn})


def lines_of(tree: Tree, script: Path, words: list[str]) -> list[str]:
    done = subprocess.run(
        [tree.python, str(script), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tree.folder,
        env={**os.environ, **engines.QUIET, **tree.environment},
    )
    if done.returncode != 0:
        raise report.InvalidRunError(f"{tree.name}, {script.name}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()


def on_servers(trees: tuple[Tree, ...], n_turns: int, is_quick: bool) -> Iterable[dict[str, Any]]:
    """Yields rows of work that is sent at once to a server of each tree; both stay up, and take turns."""
    for work in [*(prompts(name, is_quick) for name in REQUESTS), decisions(is_quick)]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers = []
            for tree in trees:
                (folder / tree.name).mkdir()
                flags = [*work.served.model_flags(folder / tree.name), *work.served.flags(engines.OURS)]
                engine = engines.OURS._replace(python_variable=tree.python_variable)
                running = engines.running(engine, flags, folder / f"{tree.name}.log", tree.environment)
                started = time.perf_counter()
                servers.append((tree, stack.enter_context(running)))
                plan = (servers[-1][1].record or {})["memory"]
                yield shown(
                    {
                        "what": work.name,
                        "tree": tree.name,
                        "start_s": time.perf_counter() - started,
                        "longest_input_tokens": plan["largest_input_tokens"],
                    }
                )
            for turn in range(n_turns + 1):  # the first warms up
                for tree, server in servers:
                    client.run(server.url, [client.Due(0.0, [1000] * 500)], "warm-up")
                    server.flush_cache()
                    started = time.perf_counter()
                    work.send(server.url)
                    ms = 1000 * (time.perf_counter() - started) / work.n_requests
                    if turn:
                        yield shown({"what": f"{work.name}, a request", "tree": tree.name, "turn": turn, "ms": ms})


def prompts(name: str, is_quick: bool) -> Work:
    work = WORKS[name]
    dues = work.requests(REQUESTS[name][is_quick])
    return Work(name, work.served, len(dues), lambda url: client.run(url, dues, name))


def decisions(is_quick: bool) -> Work:
    """Requests of several questions about one state each, in one order of their options."""
    from benchmarks.branches import run as branches  # which imports this module

    maker = branches.Maker(demo_model.ensure())
    bodies = [maker.work(STATE_TOKENS, QUESTIONS).body for _ in range(2 if is_quick else N_DECISIONS)]

    def send(url: str) -> None:
        with ThreadPoolExecutor(len(bodies)) as threads:
            for reply in threads.map(lambda body: post(f"{url}/v1/systemone", body), bodies):
                reply.raise_for_status()

    return Work("decisions", rivals.RERANKING, len(bodies), send)


def post(url: str, body: bytes) -> requests.Response:
    return requests.post(url, body, headers={"Content-Type": "application/json"}, timeout=600)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    print(row, file=sys.stderr)
    return row


def medians_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for what in dict.fromkeys(row["what"] for row in rows):
        of = {
            name: statistics.median(row["ms"] for row in rows if (row["what"], row["tree"]) == (what, name))
            for name in ("before", "now")
        }
        found.append({"what": what, "before_ms": of["before"], "now_ms": of["now"], "ratio": of["now"] / of["before"]})
    return found


def targets_of(medians: list[dict[str, Any]]) -> list[report.Target]:
    return [report.Target.at_most(f"{one['what']}: ms, now / before", one["ratio"], MOST) for one in medians]


def longest_of(rows: list[dict[str, Any]]) -> list[report.Target]:
    tokens = {(row["what"], row["tree"]): row["longest_input_tokens"] for row in rows}
    return [
        report.Target.at_least(f"{what}: longest input by memory, now / before", found / tokens[what, "before"], LEAST)
        for (what, tree), found in tokens.items()
        if tree == "now"
    ]


if __name__ == "__main__":
    sys.exit(main())
