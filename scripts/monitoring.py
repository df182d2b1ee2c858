"""Generates the Grafana dashboard, the alert rules and the README's table in `sgl_prefill/observability` from its metric list.

`python scripts/monitoring.py --write` writes them; without the flag it says which files differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from sgl_prefill.core import metric_list
from sgl_prefill.core.metric_list import METRICS

FOLDER = Path(__file__).resolve().parents[1] / "sgl_prefill/observability"
BEGIN, END = "<!-- metrics: generated -->\n", "<!-- end -->\n"
PANEL_WIDTH, PANEL_HEIGHT, GRID_WIDTH = 12, 8, 24

# Of SGLang's own, which say how many tokens came in.
PROMPT_TOKENS = "sglang:prompt_tokens_total"


class Panel(NamedTuple):
    """A graph of the dashboard."""

    title: str
    unit: str  # Grafana's name of it
    queries: dict[str, str]  # by legend


class Alert(NamedTuple):
    """A rule: what is wrong where the expression has a value for so long."""

    name: str
    expression: str
    for_: str
    severity: str
    summary: str
    remedy: str


def _name(name: str) -> str:
    return metric_list.BY_NAME[name].exposed


def _rate(metric: str, window: str = "5m", by: str = "instance") -> str:
    return f"sum by ({by}) (rate({metric}[{window}]))"


def _quantile(share: float, name: str, window: str = "5m") -> str:
    return f"histogram_quantile({share}, {_rate(_name(name) + '_bucket', window, 'instance, le')})"


def _share(tokens: str, of: str, window: str) -> str:
    return f"{_rate(tokens, window)} / {_rate(of, window)}"


def panels() -> list[Panel]:
    """Lists the graphs, in the order of the dashboard."""
    return [
        Panel("Waiting requests", "short", {"{{instance}}": _name("waiting_requests")}),
        Panel(
            "Age of waiting requests",
            "s",
            {
                "oldest {{instance}}": _name("oldest_wait_seconds"),
                "p99 {{instance}}": _name("p99_wait_seconds"),
                "passed over {{instance}}": _name("starvation_seconds"),
            },
        ),
        Panel(
            "Wait until a request's step",
            "s",
            {f"p{round(share * 100)} {{{{instance}}}}": _quantile(share, "wait_seconds") for share in (0.5, 0.9, 0.99)},
        ),
        Panel(
            "Error of predicted step times",
            "percentunit",
            {f"p{round(share * 100)} {{{{instance}}}}": _quantile(share, "jct_error_ratio") for share in (0.5, 0.9)},
        ),
        Panel(
            "Share of input tokens found in the cache",
            "percentunit",
            {"{{instance}}": _share(_name("cached_tokens"), PROMPT_TOKENS, "5m")},
        ),
        Panel(
            "Input tokens a second",
            "short",
            {f"{what} {{{{instance}}}}": _rate(_name(f"{what}_tokens")) for what in ("cached", "kept", "evicted")},
        ),
        Panel("Refused requests a second", "reqps", {"{{reason}}": _rate(_name("refused_requests"), by="reason")}),
        Panel(
            "Tokens of long texts a second, cached or not",
            "short",
            {"{{cached}}": _rate(_name("text_tokens"), by="cached")},
        ),
        Panel("Long texts that wait to be tokenised", "short", {"{{instance}}": _name("text_queue_requests")}),
        Panel("Time of the policy, a step", "s", {"p99 {{instance}}": _quantile(0.99, "policy_seconds")}),
    ]


def alerts() -> list[Alert]:
    """Lists the rules. Their limits are starting points, for a service whose requests wait for seconds at most."""
    return [
        Alert(
            "SglPrefillQueueIsOld",
            f"{_name('oldest_wait_seconds')} > 30",
            "2m",
            "warning",
            "a request has waited for {{ $value | humanizeDuration }}",
            "more load than one engine computes: add engines, or let requests carry deadlines, so that they are refused at once",
        ),
        Alert(
            "SglPrefillPredictionsAreWrong",
            f"{_quantile(0.5, 'jct_error_ratio', '15m')} > 0.5",
            "15m",
            "warning",
            "half of all steps differ from their prediction by more than {{ $value | humanizePercentage }}",
            "something else uses the machine, or the load is unlike the start's profile: order and refusals follow wrong times",
        ),
        Alert(
            "SglPrefillRefusesRequests",
            f"{_rate(_name('refused_requests'), by='instance, reason')} > 0.1",
            "5m",
            "warning",
            "{{ $value | humanize }} requests a second are refused: {{ $labels.reason }}",
            "the reply of each says why; `overloaded` and `deadline_unreachable` mean too much load for this engine",
        ),
    ]


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it; the data source is asked for there."""
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    made = []
    for index, panel in enumerate(panels()):
        x = index * PANEL_WIDTH % GRID_WIDTH
        y = index * PANEL_WIDTH // GRID_WIDTH * PANEL_HEIGHT
        targets = [
            {"refId": chr(ord("A") + n), "expr": query, "legendFormat": legend, "datasource": source}
            for n, (legend, query) in enumerate(panel.queries.items())
        ]
        made.append(
            {
                "id": index + 1,
                "type": "timeseries",
                "title": panel.title,
                "datasource": source,
                "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    # A variable, which Grafana fills for imported and for provisioned dashboards; `__inputs` only for imported ones.
    variable = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "templating": {"list": [variable]},
        "title": "sgl_prefill",
        "uid": "sgl-prefill",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": made,
    }


def rules() -> dict[str, Any]:
    """Returns the rule file of Prometheus."""
    shown = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.remedy},
        }
        for alert in alerts()
    ]
    return {"groups": [{"name": "sgl_prefill", "rules": shown}]}


def table() -> str:
    """Returns the metrics as the page shows them."""
    rows = [
        f"| `{metric.exposed}` | {metric.kind} | {metric.meaning} |"
        + "".join(f" `{label}`" for label in metric.labels)
        + " |"
        for metric in METRICS
    ]
    return "\n".join(["| metric | kind | meaning | its own labels |", "| --- | --- | --- | --- |", *rows]) + "\n"


def files() -> dict[Path, str]:
    """Returns what each generated file holds. JSON is YAML too, so that Prometheus reads the rules as they are."""
    page = FOLDER / "README.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return {
        FOLDER / "grafana.json": json.dumps(dashboard(), indent=1) + "\n",
        FOLDER / "alerts.json": json.dumps(rules(), indent=1) + "\n",
        page: f"{before}{BEGIN}\n{table()}\n{END}{after}",
    }


def main(argv: list[str]) -> int:
    """Writes the files with `--write`; else says which differ, with status 1."""
    differing = {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}
    if "--write" in argv:
        for path, text in differing.items():
            path.write_text(text, encoding="utf-8")
    for path in differing:
        print(f"{path.name} {'written' if '--write' in argv else 'differs: run it with --write'}")
    return 1 if differing and "--write" not in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
