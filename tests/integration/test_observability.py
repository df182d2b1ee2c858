"""A server's `/metrics` against the list of ours, and what a start prints."""

from __future__ import annotations

import re

import requests
from prometheus_client.parser import text_string_to_metric_families

from scripts import monitoring
from sgl_prefill.core.metric_list import METRICS, PREFIX
from tests.integration.conftest import Server

MOST_START_LINES = 30

SGLANGS_OWN = "sglang:prefill_effective_tokens_total"  # with the prefix of this package's


def test_a_live_server_exposes_the_metrics_of_the_list_and_no_others(server: Server) -> None:
    """With their kinds and meanings, with labels that nobody but the server fills, and all that the dashboard asks for."""
    server.scores("observed", allowed_tokens=[" a", " b"])
    assert server.post("/v1/completions", {"model": "demo", "prompt": []}).status_code == 400
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    kinds = dict(re.findall(rf"^# TYPE ({PREFIX}\w+) (\w+)$", text, re.MULTILINE))
    assert kinds == {SGLANGS_OWN: "counter"} | {metric.exposed: metric.kind for metric in METRICS}
    for metric in METRICS:
        assert f"# HELP {metric.exposed} {metric.meaning}\n" in text
        found = set(re.findall(r'(\w+)="', " ".join(re.findall(rf"^{metric.exposed}\w*{{(.*)}}", text, re.MULTILINE))))
        ranks = {label for label in found if label.endswith("_rank")}
        assert found - ranks - {"model_name", "engine_type", "le"} == set(metric.labels)
    assert f"\n{monitoring.PROMPT_TOKENS}{{" in text


def test_a_scraper_of_openmetrics_gets_the_names_that_the_dashboards_ask_for(server: Server) -> None:
    """prometheus_client would write `sglang_...` for samples below `sglang:...`, which its own parser refuses."""
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    reply = requests.get(f"{server.url}/metrics", headers=accept, timeout=60)
    assert reply.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert families["sglang:per_stage_req_latency_seconds"].samples


def test_a_start_prints_what_matters_and_little_else(server: Server) -> None:
    """It had printed 70 lines, most of them warnings of SGLang's imports about hardware that is not there."""
    lines = server.log.read_text().splitlines()
    (last,) = [n for n, line in enumerate(lines, 1) if f"at {server.url}" in line]
    start = lines[:last]
    assert start[0].startswith("sgl_prefill: starts")
    assert last <= MOST_START_LINES, start
    assert "memory plan, longest input" in "\n".join(start)
