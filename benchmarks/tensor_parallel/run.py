"""How much longer an input do two ranks serve than one, with as much memory each; are answers the same, and what does it cost?

    python benchmarks/tensor_parallel/run.py [--quick] [--json PATH]

See the README beside this file.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import requests

from benchmarks import process_memory, report, shapes
from benchmarks.harness import client, traffic
from benchmarks.harness.engines import OURS, QUIET
from sgl_prefill.entry import local_server

# Llama 3.1 8B with all widths divided by 4, of 2 layers: what an input takes beside durable KV does not depend on their number.
MODEL, N_LAYERS = "llama-3.1-8b-quarter", 2
BUDGET_MIB = 256  # of a rank, beyond its weights
RANKS = (1, 2)
SPEED_TOKENS = (512, 4096)
N_SPEED, N_TURNS = 8, 3
N_KILLED, KILL_CONNECTIONS, HEARD_S = 200, 24, 10
SAME = 1e-4  # float32, log-probabilities
N_COMPARED = 24


def main() -> int:
    arguments = report.arguments(__doc__, Path(__file__).with_name("result.json"))
    conditions = {
        **report.conditions(),
        "model": MODEL,
        "layers": N_LAYERS,
        "budget_mib_a_rank": BUDGET_MIB,
        "commands": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes.write(MODEL, folder / "model")
        config = folder / "model" / "config.json"
        config.write_text(json.dumps({**shapes.config(MODEL), "num_hidden_layers": N_LAYERS}))
        shapes.write_weights(folder / "model")
        weights_mib = dict.fromkeys(RANKS, 0.0)
        rows: list[dict[str, Any]] = []
        for ranks in RANKS:  # a first start tells what the weights of a rank take
            with serving(folder, ranks, 4096, conditions) as (url, _):
                weights_mib[ranks] = weights_of(url)
        for ranks in RANKS:
            budget_mib = ranks * (BUDGET_MIB + weights_mib[ranks])
            with serving(folder, ranks, budget_mib, conditions) as (
                url,
                _,
            ):  # a second, how long an input they leave room for
                rows.append({"ranks": ranks, **memory_of(url), "weights_mib_a_rank": weights_mib[ranks]})
            n_tokens = 1000 if arguments.quick else rows[-1]["longest_input_tokens"]
            flags = ["--max-input-length", str(n_tokens)]
            with serving(folder, ranks, budget_mib, conditions, *flags, name=", longest input") as (url, pid):
                rows[-1] |= {"served_tokens": n_tokens, **serve(url, pid, n_tokens)}
            print(rows[-1], file=sys.stderr)
        compared = compare(folder, conditions, quick=arguments.quick)
    found = {row["ranks"]: row for row in rows}
    targets = [
        report.Target.at_least(
            f"longest input in {BUDGET_MIB} MiB a rank, 2 ranks / 1",
            found[2]["longest_input_tokens"] / found[1]["longest_input_tokens"],
            1.8,
        ),
        report.Target.at_most(
            "largest difference of a log-probability, float32, 2 ranks and 1", compared["difference"], SAME
        ),
        report.Target.at_most("kill of a rank under load: requests lost without an error", compared["kill"]["lost"], 0),
    ]
    report.finish({"conditions": conditions, "rows": rows, **compared}, targets, arguments.json)
    return 0


@contextmanager
def serving(
    folder: Path, ranks: int, budget_mib: float, conditions: dict[str, Any], *flags: str, name: str = ""
) -> Iterator[tuple[str, int]]:
    """Yields the URL and the launcher's pid of a server with that many ranks, which share this memory."""
    given = [*shapes.weight_flags(folder / "model", shapes.DTYPE), "--memory-budget-gb", f"{budget_mib / 1024:.4f}"]
    given += ["--tp-size", str(ranks), "--sleep-on-idle", *flags]
    environment = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], "PYTHONPATH": str(report.REPOSITORY), **QUIET}
    log = folder / f"{time.monotonic_ns()}.log"
    with local_server.running(OURS.module, given, log, environment=environment) as server:
        conditions["commands"][f"{ranks} ranks{name}"] = report.portable(server.command)
        yield server.url, server.process.pid


def record_of(url: str) -> dict[str, Any]:
    record: dict[str, Any] = requests.get(f"{url}/server_info", timeout=60).json()["sgl_prefill"]
    return record


def weights_of(url: str) -> float:
    (row,) = [row for row in record_of(url)["memory"]["rows"] if row["what"] == "weights"]
    return float(row["mib"])


def memory_of(url: str) -> dict[str, Any]:
    record = record_of(url)
    memory = record["memory"]
    return {
        "longest_input_tokens": memory["largest_input_tokens"],
        "memory": memory["rows"],
        "ranks_of_record": record.get("ranks"),
        "parity_gate": record["parity_gate"],
    }


def serve(url: str, pid: int, n_tokens: int) -> dict[str, Any]:
    """Sends an input of that many tokens and watches each rank's memory. Raises InvalidRunError without an answer."""
    ranks = [one.pid for one in psutil.Process(pid).children(recursive=True) if "scheduler" in " ".join(one.cmdline())]
    with ExitStack() as stack:
        watches = [stack.enter_context(process_memory.watch(one, process_memory.resident_bytes(one))) for one in ranks]
        (outcome,) = client.run(url, traffic.alone([n_tokens], None), f"{n_tokens} tokens")
    return {"seconds": outcome.latency_s, "peak_mib_a_rank": [watch.peak_bytes >> 20 for watch in watches]}


def compare(folder: Path, conditions: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """The same prompts in float32, then how fast the default type is, in turns, and last the death of a rank."""
    rng = random.Random(7)
    prefix = shapes.token_ids(rng, 300)
    prompts = [shapes.token_ids(rng, n) for n in (1, 2, 63, 500, 1500, 3000)]
    prompts += [[*prefix, *shapes.token_ids(rng, rng.randrange(1, 80))] for _ in range(N_COMPARED - len(prompts))]
    answers = []
    for ranks in RANKS:
        flags = ["--dtype", "float32", "--max-input-length", "4000"]
        with serving(folder, ranks, 4096, conditions, *flags, name=", float32") as (url, _):
            answers.append([client.run(url, [client.Due(0.0, one)], "compare")[0].logprobs for one in prompts])
    difference = max(abs(a - b) for one, other in zip(*answers, strict=True) for a, b in zip(one, other, strict=True))
    rows: list[dict[str, Any]] = []
    flags = ["--max-input-length", "8000"]
    with (
        serving(folder, 1, 2048, conditions, *flags, name=", speed") as (one, _),
        serving(folder, 2, 2048, conditions, *flags, name=", speed") as (two, pid),
    ):
        for turn in range(1 if quick else N_TURNS):
            for name, url in (("1 rank", one), ("2 ranks", two), ("1 rank, again", one)):
                for n_tokens in SPEED_TOKENS:
                    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
                    outcomes = client.run(
                        url, traffic.alone([n_tokens] * (1 if quick else N_SPEED), None), f"{name}, {turn}"
                    )
                    seconds = max(outcome.finish_s for outcome in outcomes)
                    rows.append(
                        {"engine": name, "tokens": n_tokens, "tokens_per_s": n_tokens * len(outcomes) / seconds}
                    )
        kill = kill_a_rank(two, pid)
    speed = [
        {
            "engine": name,
            "tokens": n_tokens,
            "tokens_per_s": statistics.median(
                row["tokens_per_s"] for row in rows if (row["engine"], row["tokens"]) == (name, n_tokens)
            ),
        }
        for name in dict.fromkeys(row["engine"] for row in rows)
        for n_tokens in SPEED_TOKENS
    ]
    return {"difference": difference, "compared": len(prompts), "speed": speed, "speed_turns": rows, "kill": kill}


def kill_a_rank(url: str, pid: int) -> dict[str, Any]:
    """Kills rank 1 by SIGKILL under load, and counts the replies of all clients."""
    launcher = psutil.Process(pid)
    family = launcher.children(recursive=True)
    (rank,) = [one for one in family if "TP1" in " ".join(one.cmdline())]
    with ThreadPoolExecutor(KILL_CONNECTIONS) as pool:
        asked = [pool.submit(ask, url, number) for number in range(N_KILLED)]
        while sum(one.done() for one in asked) < N_KILLED // 4:
            time.sleep(0.01)
        killed_s = time.monotonic()
        rank.kill()
        answers = [one.result() for one in asked]
    _, alive = psutil.wait_procs([launcher, *family], timeout=HEARD_S)
    return {
        "requests": N_KILLED,
        "answers": dict(Counter(answers)),
        "last_heard_s": round(time.monotonic() - killed_s, 1),
        "processes_left": len([one for one in alive if one.status() != psutil.STATUS_ZOMBIE]),
        "lost": answers.count("nothing"),
    }


def ask(url: str, number: int) -> str:
    """Returns the status, or that the server is gone: a connection that is refused or reset is an error that a client sees."""
    body = client.body_of(client.Due(0.0, shapes.token_ids(random.Random(number), 200)))
    try:
        reply = requests.post(f"{url}/generate", json=body, timeout=120)
    except requests.Timeout:
        return "nothing"
    except requests.RequestException:
        return "connection ended"
    return str(reply.status_code)


if __name__ == "__main__":
    sys.exit(main())
