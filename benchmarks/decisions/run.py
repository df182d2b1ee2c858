"""Choices of made-up messages: are averaged orders right more often, and do answers depend on the order of options?

    python benchmarks/decisions/run.py [--quick] [--json PATH]

See the README beside this file.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests

from benchmarks import report, shapes
from benchmarks.decisions import small_model, suites
from benchmarks.decisions.messages import SETS, MessageSet
from benchmarks.harness import engines
from sgl_prefill.core.decision_prompts import MOST_ORDERS, Kind, Option, Question, prompts_of
from sgl_prefill.examples import demo_model

WAYS = ("one order", "default orders", "names")


class Item(NamedTuple):
    of: MessageSet
    message: str
    right: str


class Found(NamedTuple):
    choice: str
    probability: float  # of the choice


def items(*, quick: bool) -> Iterator[Item]:
    for of in SETS.values():
        for right, messages in of.messages.items():
            yield from (Item(of, message, right) for message in messages[: 1 if quick else None])


def rotated(of: MessageSet, start: int) -> dict[str, str]:
    """The options in another order."""
    names = list(of.options)
    return {name: of.options[name] for name in [*names[start:], *names[:start]]}


def choose(url: str, item: Item, options: dict[str, str], orders: int | None) -> Found:
    question = {"type": "choice", "instructions": item.of.question, "criteria": options}
    body: dict[str, Any] = {"model": "jev-latest", "state": item.message, "questions": {"q": question}}
    if orders is not None:
        body["x_options"] = {"q": {"orders": orders}}
    reply = requests.post(f"{url}/v1/systemone", json=body, timeout=120)
    reply.raise_for_status()
    answer = reply.json()["answers"]["q"]
    return Found(answer["choice"], answer["probabilities"][answer["choice"]])


def choose_by_name(url: str, item: Item, options: dict[str, str], orders: int | None) -> Found:
    """The same question, answered with the name of an option: labels of several tokens."""
    asked = Question(Kind.CHOICE, item.of.question, tuple(Option(*one) for one in options.items()))
    lines = prompts_of(asked, 1)[0].text.splitlines()[1:-1]
    shown = "\n".join(line.partition(": ")[2] for line in lines)
    text = f"{item.message}\n\nQuestion: {item.of.question}\n{shown}\nAnswer with the name of one option only."
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "allowed_answers": list(options)}
    reply = requests.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    reply.raise_for_status()
    labels = reply.json()["choices"][0]["label_scores"]["labels"]
    best = max(labels, key=lambda one: one["probability"])
    return Found(best["label"], best["probability"])


YES_NO = {"yes or no": ("yes", "no"), "Yes or No": ("Yes", "No")}


def yes_no_rows(url: str, asked: list[Item]) -> list[dict[str, Any]]:
    """Is each message about its right option, and about the next one? By the codes that the prompt asks for, and in which form
    they are read."""
    rows = []
    for shown, codes in itertools.product(YES_NO, YES_NO.values()):
        right, masses, n_yes = [], [], 0
        for item in asked:
            names = list(item.of.options)
            for is_true, name in ((True, item.right), (False, names[names.index(item.right) - 1])):
                text = f"Is the following true? The message is about {name} ({item.of.options[name]})."
                content = f"{item.message}\n\n{text}\nAnswer with {shown} only."
                body = {"model": "m", "messages": [{"role": "user", "content": content}], "allowed_tokens": codes}
                reply = requests.post(f"{url}/v1/chat/completions", json=body, timeout=120)
                reply.raise_for_status()
                scores = reply.json()["choices"][0]["label_scores"]
                says_yes = scores["labels"][0]["probability"] >= 0.5
                right.append(says_yes is is_true)
                masses.append(scores["label_mass"])
                n_yes += says_yes
        row = {"asked": shown, "read": "/".join(codes), "accuracy": statistics.mean(right)}
        rows.append({**row, "says_yes": n_yes / len(right), "label_mass": statistics.mean(masses)})
        print(rows[-1], file=sys.stderr)
    return rows


def measure(model: Callable[[], Path], quick: bool) -> dict[str, Any]:
    """Each item in the four cyclic orders of its options as the client may send them."""
    asked = list(items(quick=quick))
    flags = [*shapes.weight_flags(model(), shapes.DTYPE), "--max-input-length", "2000", *shapes.budget(3)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        engines.running(engines.OURS, flags, Path(scratch) / "log") as server,
    ):
        for way in WAYS:
            choice = choose_by_name if way == "names" else choose
            orders = 1 if way == "one order" else None
            found = [[choice(server.url, one, rotated(one.of, start), orders) for start in range(4)] for one in asked]
            rows.append({"way": way, **figures(asked, found)})
            print(rows[-1], file=sys.stderr)
        more: dict[str, Any] = {"yes_no": yes_no_rows(server.url, asked)}
        more["sys1bench"] = suites.sys1bench(server.url, Path(scratch), quick=quick)
        print(more, file=sys.stderr)
    one, default = (next(row for row in rows if row["way"] == way) for way in WAYS[:2])
    targets = [
        report.Target.at_most("default orders: items whose answer depends on the order", default["depend"], 0),
    ]
    if model is small_model.ensure:
        ratio = default["accuracy"] / one["accuracy"]
        targets.insert(0, report.Target.at_least("accuracy, default orders / one order", ratio, 1.5))
    return report.part(rows, targets, items=len(asked), **more)


def figures(asked: list[Item], found: list[list[Found]]) -> dict[str, Any]:
    """accuracy: share of right answers over all items and client's orders; depend: items that got several answers."""
    pairs = [(one, answer) for one, answers in zip(asked, found, strict=True) for answer in answers]
    right = [answer.choice == one.right for one, answer in pairs]
    places = [0] * 4
    for one, answers in zip(asked, found, strict=True):
        for start, answer in enumerate(answers):
            places[list(rotated(one.of, start)).index(answer.choice)] += 1
    bins: dict[int, list[tuple[float, bool]]] = {}
    for (_, answer), is_right in zip(pairs, right, strict=True):
        bins.setdefault(min(int(10 * answer.probability), 9), []).append((answer.probability, is_right))
    error = sum(abs(sum(p - is_right for p, is_right in of_bin)) for of_bin in bins.values()) / len(pairs)
    return {
        "accuracy": statistics.mean(right),
        "depend": sum(len({answer.choice for answer in answers}) > 1 for answers in found),
        "places": places,  # how often the first to the fourth option was chosen
        "calibration_error": error,  # expected, ten bins
    }


def measure_orders(quick: bool) -> dict[str, Any]:
    """Accuracy by the number of orders that are averaged: from two on they do not depend on the client's."""
    asked, rows = list(items(quick=quick)), []
    flags = [*shapes.weight_flags(small_model.ensure(), shapes.DTYPE), "--max-input-length", "2000", *shapes.budget(3)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        engines.running(engines.OURS, flags, Path(scratch) / "log") as server,
    ):
        for n_orders in range(1, MOST_ORDERS + 1):
            starts = range(4 if n_orders == 1 else 1)
            right = [
                choose(server.url, one, rotated(one.of, start), n_orders).choice == one.right
                for one, start in itertools.product(asked, starts)
            ]
            rows.append({"orders": n_orders, "accuracy": statistics.mean(right)})
            print(rows[-1], file=sys.stderr)
    return report.part(rows, [], items=len(asked))


def measure_relations(quick: bool) -> dict[str, Any]:
    flags = [*shapes.weight_flags(demo_model.ensure(), shapes.DTYPE), "--max-input-length", "4000", *shapes.budget(3)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        engines.running(engines.OURS, flags, Path(scratch) / "log") as server,
    ):
        return report.part([suites.jevbench(server.url, Path(scratch), quick=quick)], [])


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "demo": functools.partial(measure, demo_model.ensure),
    "qwen": functools.partial(measure, small_model.ensure),
    "orders": measure_orders,
    "relations": measure_relations,
}

if __name__ == "__main__":
    sys.exit(report.in_parts(__doc__, Path(__file__), PARTS))
