"""Metrics keep Prometheus' conventions, and dashboard, rules and page hold these metrics and no others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from scripts import monitoring
from sgl_prefill.core.metric_list import METRICS, PREFIX, Metric

UNITS = ("seconds", "bytes", "tokens", "ratio", "requests", "lines")
# Of which our own code is the only author.
BOUNDED_LABELS = {"cached", "reason"}
NAMES = {metric.exposed for metric in METRICS}


def test_the_files_of_a_deployment_name_what_is_there() -> None:
    """Compose's services and mounts, Prometheus' target and rules, and the commands of image and unit."""
    root, folder = monitoring.FOLDER.parents[1], monitoring.FOLDER
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    services = compose["services"]
    assert (folder / services["engine"]["build"] / "Dockerfile").resolve() == root / "Dockerfile"
    mounts = [volume.split(":") for one in services.values() for volume in one["volumes"]]
    for source, *_ in mounts:
        assert (folder / source).exists() if source.startswith("./") else source in compose["volumes"]
    prometheus = yaml.safe_load((folder / "prometheus.yaml").read_text())
    places = {target for source, target, *_ in mounts}
    assert {f"/etc/prometheus/{file}" for file in prometheus["rule_files"]} <= places
    (host, port) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"][0].split(":")
    dockerfile = (root / "Dockerfile").read_text()
    assert host in services
    assert f"EXPOSE {port}" in dockerfile
    provider = yaml.safe_load((folder / "grafana_dashboards.yaml").read_text())["providers"][0]
    assert any(place.startswith(provider["options"]["path"]) for place in places)
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.M)[0])
    (started,) = re.findall(r"^ExecStart=(.*)$", (folder / "sgl-prefill.service").read_text(), re.M)
    for words in (entry, started.split()):
        assert words[0].endswith(".venv/bin/python")
        assert words[1:3] == ["-m", "sgl_prefill.launch_server"]
        assert words[-2:] == ["--port", port]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_by_its_base_unit_and_explained(metric: Metric) -> None:
    """A unit such as ms, or a label that a client fills, makes queries wrong or the database large."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.name.rsplit("_", 1)[-1] in UNITS
    assert metric.meaning[0].isupper() or metric.meaning[0].isdigit()
    assert metric.meaning.endswith(".")
    assert metric.exposed.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert set(metric.labels) <= BOUNDED_LABELS


def test_the_committed_files_are_those_that_are_generated() -> None:
    for path, text in monitoring.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: scripts/monitoring.py --write"


def expressions() -> list[str]:
    queries = [query for panel in monitoring.panels() for query in panel.queries.values()]
    return [*queries, *(alert.expression for alert in monitoring.alerts())]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_asks_for_metrics_that_exist(expression: str) -> None:
    """A misspelt metric is an empty graph, and a rule that never fires."""
    asked = re.findall(r"sglang:\w+", expression)
    assert asked
    for name in asked:
        base = re.sub(r"_bucket$", "", name)
        assert base in NAMES or base == monitoring.PROMPT_TOKENS
    assert expression.count("(") == expression.count(")")


def test_every_metric_is_on_the_dashboard() -> None:
    shown = json.dumps(monitoring.dashboard())
    assert not [metric.exposed for metric in METRICS if metric.exposed not in shown]


def test_rules_have_what_prometheus_asks_of_a_rule_file() -> None:
    (group,) = monitoring.rules()["groups"]
    assert group["name"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smhd]", rule["for"])
        assert PREFIX in rule["expr"]


def test_every_graph_has_a_unit_of_grafanas_and_an_expression_for_each_legend() -> None:
    """A unit that Grafana does not know is shown as text behind each number."""
    for panel in monitoring.dashboard()["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"] in {"short", "s", "percentunit", "reqps"}
        assert panel["targets"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_rules_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    """By Prometheus' own tool, on series made by hand."""
    shutil.copy(monitoring.FOLDER / "alerts.json", tmp_path)
    shutil.copy(Path(__file__).with_name("alert_rules_test.yml"), tmp_path)
    command = ["promtool", "test", "rules", "alert_rules_test.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_prometheus_can_read_every_graphs_expression(tmp_path: Path) -> None:
    queries = [query for panel in monitoring.panels() for query in panel.queries.values()]
    rules = [{"record": f"query_{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "queries.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
