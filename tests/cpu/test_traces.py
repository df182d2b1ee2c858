"""What a request's spans are told of the scheduler's decision, and that nothing is made where nobody traces."""

from __future__ import annotations

import pickle
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from sglang.srt.observability import req_time_stats
from sglang.srt.observability.trace import TraceNullContext

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.job import Job
from sgl_prefill.entry import processes
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.port.steps import time_stats, traces
from sgl_prefill.port.steps.step_state import StartedStep
from sgl_prefill.startup import arguments, examine


class Context:
    """In the place of SGLang's context of a traced request."""

    tracing_enable = True

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def trace_event(self, *event: Any) -> None:
        self.events.append(event)


def started(*contexts: Any) -> list[tuple[Job, Any]]:
    """Requests that waited for 2 s, of 5 tokens each."""
    return [
        (
            Job(array("q", range(5)), 1.0, 4, rid=f"r{n}"),
            SimpleNamespace(rid=f"r{n}", time_stats=SimpleNamespace(trace_ctx=one)),
        )
        for n, one in enumerate(contexts)
    ]


def test_each_request_of_a_step_is_told_with_whom_it_was_picked() -> None:
    first, second = Context(), Context()
    traces.Traces().on_step_start(StartedStep(7, 3.0, 12.3456, started(first, second)))
    ((name, level, ts_ns, told),) = second.events
    assert (name, level) == (traces.EVENT, traces.LEVEL)
    assert ts_ns > 1e18  # since 1970
    assert told == {
        "sgl_prefill.step": 7,
        "sgl_prefill.step_requests": 2,
        "sgl_prefill.picked_first": "r0",
        "sgl_prefill.wait_ms": 2000.0,
        "sgl_prefill.predicted_ms": 12.346,
        "sgl_prefill.input_tokens": 5,
        "sgl_prefill.cached_tokens": 0,
    }
    assert len(first.events) == 1


def test_an_unknown_prediction_is_left_out() -> None:
    """OpenTelemetry has no attribute without a value, and a policy without a JCT model predicts no time."""
    context = Context()
    traces.Traces().on_step_start(StartedStep(1, 3.0, None, started(context)))
    assert context.events[0][3]["sgl_prefill.step"] == 1
    assert "sgl_prefill.predicted_ms" not in context.events[0][3]


def test_nothing_is_made_where_nobody_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives each request a context all the same, which would take any event."""
    monkeypatch.setattr(traces, "_attributes", lambda *_: pytest.fail("attributes were made"))
    traces.Traces().on_step_start(StartedStep(1, 3.0, None, started(TraceNullContext())))


def test_a_root_span_gets_numbers_and_nothing_else_of_the_facts() -> None:
    """Among the facts of a reply are lists of scores, which are no attribute."""
    stats = SimpleNamespace()
    time_stats.add_facts(stats, kept_tokens=3, evicted_tokens=4, answers=[[0.5]])
    assert traces.of_answered(stats) == {"sgl_prefill.kept_tokens": 3, "sgl_prefill.evicted_tokens": 4}


def test_a_step_of_the_wall_clock_moves_no_time_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests once waited for an hour, or had replies without times: a 500."""

    def sent(stats: Any, hook: Any) -> Any:
        """To a process whose wall clock has been set back since it started."""
        state = pickle.loads(pickle.dumps(hook(stats.__getstate__(), stats)))
        received = type(stats)()
        with monkeypatch.context() as receiver:
            receiver.setattr(req_time_stats, "global_diff_realtime_monotonic", -86_400.0)
            received.__setstate__(state)
        return received

    request = req_time_stats.APIServerReqTimeStats()
    request.api_server_dispatch_time = 5.0
    assert sent(request, time_stats.after_getstate_in_http).api_server_dispatch_time == 5.0
    reply = req_time_stats.SchedulerReqTimeStats(has_timing_data=True)
    reply.prefill_finished_time = 7.0
    through_detokenizer = sent(sent(reply, time_stats.after_getstate), time_stats.after_getstate)
    assert through_detokenizer.prefill_finished_time == 7.0
    assert type(through_detokenizer.prefill_finished_time) is float


def test_tracing_without_its_packages_is_refused_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would end its scheduler with a RuntimeError, once the model is about to be loaded."""
    monkeypatch.setattr(examine, "TRACE_MODULES", ("no_such_package.of_traces",))
    (problem,) = arguments.check_argv(PrefillConfig(), ["--enable-trace"], listens=False)
    assert "pip install '.[trace]'" in problem
    assert arguments.check_argv(PrefillConfig(), [], listens=False) == []


def test_a_port_that_was_taken_during_the_start_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up had asked for ten minutes whether uvicorn listens, which had long given up."""

    class Nobody(requests.Session):
        def get(self, *_: Any, **__: Any) -> Any:
            raise requests.ConnectionError

    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    monkeypatch.setattr(examine, "port_problems", lambda listening: [f"{listening[0][2]} is taken"])
    server_args: Any = SimpleNamespace(url=lambda: "http://here", host="127.0.0.1", port=1234)
    with pytest.raises(ConfigurationError, match="1234 is taken"):
        processes._wait_until_listening(Nobody(), server_args)
