"""Which steps of a GPU are replayed from CUDA graphs: our defaults in SGLang's own arguments, and what must not be replayed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt import platforms
from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_prefill_registry
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner import PrefillCudaGraphRunner
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sgl_prefill.config import PrefillConfig
from sgl_prefill.entry.engine import sglang_defaults
from sgl_prefill.entry.hooks import hooks_for
from sgl_prefill.port.runner import branch_rows, forward, replays
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.startup import arguments
from sgl_prefill.startup.arguments import DEVICE_MAX_REQUESTS, DEVICE_REPLAYED_TOKENS
from sgl_prefill.startup.record import StartRecord
from tests.support import tiny_models

GRAPH_FLAGS = {"cuda_graph_max_bs_prefill", "disable_decode_cuda_graph", "max_running_requests"}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had a GPU, for our own part."""
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: True)


@pytest.fixture
def made(on_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """SGLang's arguments of an H100, resolved by SGLang, which notes some of them in environment variables."""
    monkeypatch.setattr(type(platforms.current_platform), "is_out_of_tree", lambda _: False)
    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda _: 81_559)
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")
    (tmp_path / "config.json").write_text(json.dumps({**tiny_models._COMMON, **tiny_models.FAMILIES["llama"]}))

    def make(**options: Any) -> Any:
        own = {
            "model_path": str(tmp_path),
            "device": "cuda",
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
        }
        found = ServerArgs(**{**own, **options})
        found.resolve_once()
        return resolving_view(found)

    with mock.patch.dict(os.environ), override_platform(is_cuda=True):
        yield make


def test_short_steps_are_recorded_with_our_defaults(made: Callable[..., Any]) -> None:
    """Up to 2,048 tokens, though requests run in one piece; SGLang takes the size of its chunks, which is -1: none at all."""
    defaults = sglang_defaults(PrefillConfig())
    assert made(**{**defaults, "cuda_graph_max_bs_prefill": None}).cuda_graph_config.prefill.bs == []
    prefill = made(**defaults).cuda_graph_config.prefill
    assert prefill.backend == "breakable"
    assert (prefill.bs[0], prefill.bs[-1], len(prefill.bs)) == (4, DEVICE_REPLAYED_TOKENS, 42)


def test_nothing_is_recorded_for_decoding_where_nothing_is_decoded(made: Callable[..., Any]) -> None:
    """36 graphs otherwise; with --allow-generation they are SGLang's matter, as is the number of requests."""
    assert made(**sglang_defaults(PrefillConfig())).cuda_graph_config.decode.backend == "disabled"
    generating = made(**sglang_defaults(PrefillConfig(allow_generation=True)))
    assert generating.cuda_graph_config.decode.backend == "full"
    assert len(generating.cuda_graph_config.decode.bs) == 36
    assert generating.max_running_requests is None


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("config", "asked", "rows"),
    [
        (PrefillConfig(), None, DEVICE_MAX_REQUESTS),
        (PrefillConfig(), "300", 300),
        (PrefillConfig(), "4", 16),
        (PrefillConfig(paper=True), None, 16),
    ],
)
def test_the_request_table_has_as_many_rows_as_a_step(config: PrefillConfig, asked: str | None, rows: int) -> None:
    """2,048 rows of a context of 131,072 tokens are 1 GiB; the profile of completion times wants 16."""
    argv = [] if asked is None else ["--prefill-max-requests", asked]
    flags = arguments.default_flags(config, argv)
    assert arguments.value_of(flags, "--max-running-requests") == str(rows)


@pytest.mark.usefixtures("on_device")
def test_a_flag_of_the_users_counts(made: Callable[..., Any]) -> None:
    """Ours come first on the command line, and SGLang takes the last."""
    asked = [
        "--cuda-graph-max-bs-prefill",
        "512",
        "--max-running-requests",
        "77",
        "--cuda-graph-backend-decode",
        "full",
    ]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = [*arguments.default_flags(PrefillConfig(), asked), *asked]
    parsed = parser.parse_args(["--model-path", "x", *flags])
    assert (parsed.cuda_graph_max_bs_prefill, parsed.max_running_requests) == (512, 77)
    found = made(
        disable_decode_cuda_graph=parsed.disable_decode_cuda_graph,
        cuda_graph_backend_decode=parsed.cuda_graph_backend_decode,
    )
    assert found.cuda_graph_config.decode.backend == "full"


def test_stock_scheduling_with_whole_kv_keeps_sglangs_graphs_and_rows(on_device: None) -> None:
    """Its steps are SGLang's, in chunks; only what is never decoded is not recorded."""
    settings = arguments.default_settings(PrefillConfig(scheduling="stock", suffix_kv="keep"))
    assert settings == {"disable_decode_cuda_graph": True}


def test_a_host_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no graphs, and memory for the table comes as it is written."""
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: False)
    for config in (PrefillConfig(), PrefillConfig(paper=True), PrefillConfig(allow_generation=True)):
        assert not GRAPH_FLAGS & set(arguments.default_settings(config))
    assert replays.around_can_run_graph not in [hook.function for hook in hooks_for(PrefillConfig(), "scheduler")]


def recorded(capture_num_tokens: list[int]) -> Any:
    """SGLang's runner of prefill graphs, as a start on a device would leave it."""
    runner: Any = object.__new__(PrefillCudaGraphRunner)
    vars(runner).update(
        capture_num_tokens=capture_num_tokens,
        max_num_tokens=max(capture_num_tokens),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        prefill_backend_name="breakable",
        has_mha_companion_layers=False,
        mla_pinned_under_bcg=False,
        enable_lora=False,
        _capture_lora=False,
        _is_full_backend=False,
        _capture_chunked_prefix=False,
        max_context_size=None,
        max_seq_len=None,
    )
    return runner


def batch(n_tokens: int, rids: list[str]) -> Any:
    """A step of hits behind 1,000 cached tokens, with the log-probabilities of labels."""
    return SimpleNamespace(
        rids=rids,
        batch_size=len(rids),
        input_ids=torch.zeros(n_tokens, dtype=torch.int64),
        input_embeds=None,
        replace_embeds=None,
        extend_prefix_lens_cpu=[1000] * len(rids),
        forward_mode=ForwardMode.EXTEND,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_logprob=True,
        global_num_tokens_cpu=None,
        contains_mm_inputs=lambda: False,
    )


def asked(state: RunnerState, runner: Any, step: Any) -> bool:
    """What SGLang is told with our hook in place."""
    return replays.around_can_run_graph(state, PrefillCudaGraphRunner.can_run_graph, runner, step)


@pytest.mark.parametrize(("n_tokens", "is_replayed"), [(15, True), (150, True), (2048, True), (2049, False)])
def test_steps_of_hits_with_labels_are_replayed(n_tokens: int, is_replayed: bool) -> None:
    """By SGLang's own judgement, which is left alone."""
    runner = recorded([4, 16, 160, 2048])
    assert asked(RunnerState(StartRecord(PrefillConfig())), runner, batch(n_tokens, ["a", "b"])) is is_replayed


def test_a_step_with_answers_of_several_tokens_is_not_replayed() -> None:
    """The logits processor would take the answers' tokens for requests: a replay hands it a batch without names."""
    step = batch(20, ["a", branch_rows.NO_REQUEST])
    assert branch_rows.are_in(step)
    assert PrefillCudaGraphRunner.can_run_graph(recorded([32]), step)
    assert not asked(RunnerState(StartRecord(PrefillConfig())), recorded([32]), step)


def test_nothing_is_replayed_while_the_start_compares_paths() -> None:
    """And again afterwards, also where it fails."""
    state, runner = RunnerState(StartRecord(PrefillConfig())), recorded([64])

    def fail() -> None:
        with replays.none(state):
            assert not asked(state, runner, batch(60, ["a"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert asked(state, runner, batch(60, ["a"]))


@pytest.mark.usefixtures("on_device")
def test_a_gpu_asks_us_before_a_replay() -> None:
    """In its scheduler process, whatever the options."""
    for config in (PrefillConfig(), PrefillConfig(scheduling="stock", suffix_kv="keep", hybrid_prefill="off")):
        targets = [hook.target for hook in hooks_for(config, "scheduler")]
        assert any(target.endswith("PrefillCudaGraphRunner.can_run_graph") for target in targets)


def test_the_sizes_of_replays_are_known() -> None:
    """None where SGLang runs all steps eagerly, or where no size fitted."""
    runner: Any = SimpleNamespace(prefill_cuda_graph_runner=recorded([4, 512]))
    assert replays.graphed_tokens(runner) == [4, 512]
    for other in (None, object()):
        runner.prefill_cuda_graph_runner = other
        assert replays.graphed_tokens(runner) == []


def test_rows_that_pad_a_replay_have_the_slot_that_is_nobodys() -> None:
    """They write K and V like all rows; a stale slot of the step before would be another request's."""
    registry = build_prefill_registry(
        device=torch.device("cpu"), max_bs=4, max_num_token=16, cache_loc_dtype=torch.int64, share_pool=False
    )
    for first, n_tokens in ((100, 16), (300, 9)):
        slots = torch.arange(first, first + n_tokens)
        step = SimpleNamespace(input_ids=slots, positions=slots, out_cache_loc=slots, mrope_positions=None)
        registry.fill_from(step, raw_bs=1, padded_bs=1, raw_num_tokens=n_tokens, padded_num_tokens=16)
    found = registry.get_slot("out_cache_loc").slice_for(1, 16)
    assert found.tolist() == [*range(300, 309), *[0] * 7]


def test_while_a_graph_is_recorded_sglangs_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that took 2,048 tokens into chunks would record what attention is planned for once. Passes are counted."""
    body = torch.nn.Module()
    vars(body)["forward"] = lambda *_: "plain"
    chunked: Any = SimpleNamespace(
        chunk_tokens=1024, plain_tokens=0, serves_short=False, n_passes=0, run=lambda *_: "hybrid"
    )
    monkeypatch.setattr(forward, "BatchIO", lambda *_: None)
    body.layers = torch.nn.ModuleList()
    forward._route(
        RunnerState(StartRecord(PrefillConfig())), body, chunked, forward.ExpertContext(body), reads_last_rows=False
    )
    step = SimpleNamespace(forward_mode=ForwardMode.EXTEND, rids=[], out_cache_loc=None)
    tokens = torch.zeros(2048, dtype=torch.int64)
    with enable_breakable_cuda_graph():
        assert body.forward(tokens, tokens, step, None) == "plain"
    assert chunked.n_passes == 0
    assert body.forward(tokens, tokens, step, None) == "hybrid"
    chunked.plain_tokens = 2048
    assert body.forward(tokens, tokens, step, None) == "plain"
    assert chunked.n_passes == 1
