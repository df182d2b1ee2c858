"""What this package steps back from, and what it refuses: by SGLang's flags, by the model, and by the class of the KV pool."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import (
    deepseek_v4_memory_pool,
    dsa_cache_layer_split,
    hisparse_memory_pool,
    minimax_m3_nvfp4_pool,
    qsa_kv_pool,
    swa_memory_pool,
    unified_draft_pool,
    unified_memory_pool,
)
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool

from sgl_prefill import launch_server
from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.memory_plan import MemoryPlan, MemoryUse
from sgl_prefill.entry import launch
from sgl_prefill.errors import ConfigurationError, MemoryPlanError
from sgl_prefill.port.kv import admission
from sgl_prefill.port.runner.sglang_model import pool_bytes
from sgl_prefill.startup import arguments, prepare, techniques
from sgl_prefill.startup.techniques import ALL, EVICT, HYBRID, POLICY, REQUIRED, STOCK_ONLY
from tests.support import tiny_models

ASKED: dict[str, Any] = {
    "scheduling": "calibrated-srjf",
    "suffix_kv": "evict",
    "hybrid_prefill": "on",
    "pack_step_tokens": 0,
}
OTHER: dict[str, Any] = {"schedule_policy": "lpm", "radix_cache_backend": "another"}


def other_value(value: Any) -> Any:
    return not value if isinstance(value, bool) else 8 if isinstance(value, int) else "another"


def is_on(config: PrefillConfig) -> list[str]:
    return [technique.name for technique in ALL if technique.is_on(config)]


@pytest.mark.parametrize("need", REQUIRED, ids=lambda need: need.field)
def test_a_flag_switches_off_what_was_not_asked_for_and_is_refused_beside_what_was(need: techniques.Required) -> None:
    given = {need.field: OTHER.get(need.field, other_value(need.value))}
    lost = {technique.name for technique in need.needed_by if technique in ALL}
    config = techniques.step_back(PrefillConfig(), techniques.of_flags(given))
    assert set(is_on(config)) == {technique.name for technique in ALL} - lost
    assert set(config.stepped_back) == lost
    assert all(need.flag in reason and str(given[need.field]) in reason for reason in config.stepped_back.values())
    asked = PrefillConfig(**ASKED)
    with pytest.raises(ConfigurationError) as refused:
        techniques.step_back(asked, techniques.of_flags(given))
    assert all(technique.without in str(refused.value) for technique in need.needed_by if technique.is_on(asked))
    assert str(refused.value).startswith(f"{need.flag} is ")


def test_flags_that_agree_switch_nothing_off() -> None:
    argv = ["--chunked-prefill-size", "-1", "--disable-overlap-schedule", "--schedule-policy=fcfs"]
    config = PrefillConfig()
    assert techniques.step_back(config, techniques.of_flags(arguments.given_in(argv))) is config


def test_all_contradictions_stand_in_one_message() -> None:
    """Seen in the bare command line, before SGLang's slow import."""
    argv = ["--chunked-prefill-size", "512", "--schedule-policy=lpm", "--enable-mixed-chunk"]
    problems = arguments.check_argv(PrefillConfig(scheduling="fifo"), argv, listens=False)
    assert [line.split()[0] for problem in problems for line in problem.splitlines()] == [
        "--chunked-prefill-size",
        "--schedule-policy",
        "--enable-mixed-chunk",
    ]
    assert arguments.check_argv(PrefillConfig(), argv, listens=False) == []


def test_an_option_of_a_technique_that_steps_back_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError) as refused:
        techniques.step_back(PrefillConfig(max_waiting="200"), techniques.of_flags({"enable_pdmux": "True"}))
    assert "--max-waiting" in str(refused.value)
    assert "--enable-pdmux" in str(refused.value)


def test_defaults_that_depend_on_scheduling_follow_it() -> None:
    config = techniques.step_back(PrefillConfig(), techniques.of_flags({"schedule_policy": "lpm"}))
    assert (config.scheduling, config.fair_by, config.pack_step_tokens) == ("stock", "none", 0)
    assert config.evicts_suffix_kv
    again = techniques.step_back(config, techniques.of_flags({"enable_memory_saver": True}))
    assert is_on(again) == [HYBRID.name]
    assert set(again.stepped_back) == {POLICY.name, EVICT.name}
    assert pickle.loads(pickle.dumps(again)).stepped_back == again.stepped_back


@pytest.mark.parametrize("one", STOCK_ONLY, ids=lambda one: one.field)
def test_some_flags_leave_everything_to_sglang(one: techniques.StockOnly) -> None:
    given = {one.field: 2 if isinstance(one.value, int) and not isinstance(one.value, bool) else "True"}
    (reason,) = techniques.stock_only(PrefillConfig(), given)
    assert reason.startswith(one.flag)
    with pytest.raises(ConfigurationError) as refused:
        techniques.stock_only(PrefillConfig(stable_answers="on"), given)
    assert one.flag in str(refused.value)
    assert "--stable-answers" in str(refused.value)


def test_the_server_of_sglang_gets_the_users_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[list[str]] = []

    def serve(flags: list[str]) -> int:
        served.append(flags)
        return 0

    monkeypatch.setattr(launch, "serve_stock", serve)
    flags = ["--model-path", "org/model", "--tokenizer-worker-num", "2"]
    assert launch_server.main(flags) == 0
    assert served == [flags]
    assert "--tokenizer-worker-num 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("llama", set()),
        ("gemma2", set()),
        ("glm4-moe-lite", set()),
        ("glm-moe-dsa", {EVICT.name}),
        ("laguna", set()),
        ("gpt-oss", set()),
        ("gemma4", {POLICY.name, EVICT.name}),
        ("qwen3-next", {POLICY.name, EVICT.name}),
        ("lfm2", {POLICY.name, EVICT.name}),
    ],
)
def test_a_model_switches_off_what_its_cache_does_not_allow(tmp_path: Path, family: str, lost: set[str]) -> None:
    one_pool = {need.field: need.value for need in REQUIRED if need.field == "disable_hybrid_swa_memory"}
    folder = tiny_models.write(tmp_path / family, family)
    if family == "gemma4":  # SGLang reads its text part only inside the whole
        whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    model = ModelConfig(str(folder), **one_pool)
    config = techniques.step_back(PrefillConfig(), admission.unsupported(model))
    assert set(config.stepped_back) == lost
    if lost:
        with pytest.raises(ConfigurationError, match=r"this model has .*: start with "):
            techniques.step_back(PrefillConfig(**ASKED), admission.unsupported(model))


def test_latent_rows_are_evicted_on_a_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(str(tiny_models.write(tmp_path, "glm4-moe-lite")))
    monkeypatch.setattr(admission, "this_device", lambda: SimpleNamespace(is_host=False))
    config = techniques.step_back(PrefillConfig(), admission.unsupported(model))
    assert is_on(config) == [POLICY.name, HYBRID.name]


def test_a_quantized_cache_is_evicted_where_that_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert techniques.of_kv_dtype("bf16") == techniques.of_kv_dtype("fp8_e4m3") == []
    assert is_on(techniques.step_back(PrefillConfig(), techniques.of_kv_dtype("nvfp4"))) == [POLICY.name, HYBRID.name]
    monkeypatch.setattr(techniques, "this_device", lambda: SimpleNamespace(is_host=False))
    assert techniques.of_kv_dtype("auto") == []
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype is fp8_e4m3 .*--suffix-kv keep"):
        techniques.step_back(PrefillConfig(**ASKED), techniques.of_kv_dtype("fp8_e4m3"))


def test_arguments_are_built_again_without_what_the_model_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(str(tiny_models.write(tmp_path, "laguna")))
    monkeypatch.setattr(ModelConfig, "from_server_args", lambda server_args: model)
    built: list[PrefillConfig] = []

    def build(config: PrefillConfig) -> Any:
        built.append(config)
        fields = {need.field: need.value for need in arguments.required_for(config)}
        others = {"kv_cache_dtype": "auto", "disable_radix_cache": False, "radix_eviction_policy": "lru"}
        return SimpleNamespace(**{**others, **fields})

    config, _ = launch.settle(PrefillConfig(), build)
    assert [is_on(one) for one in built] == [[one.name for one in ALL], [HYBRID.name]]
    assert config is built[-1]


def test_without_eviction_no_input_is_longer_than_the_pool() -> None:
    """Its request would wait for room for ever."""
    plan = MemoryPlan(MemoryUse(0, 1 << 30, 0, 0.0, 0, 1024), 1000, 5000, 420)
    assert prepare._all_kept(plan, PrefillConfig(suffix_kv="keep"))[1:] == (413, 413, 420)
    with pytest.raises(
        MemoryPlanError, match=r"1000, .* serve whole has 413 tokens: lower it, or start with --suffix-kv evict"
    ):
        prepare._all_kept(plan, PrefillConfig(suffix_kv="keep", max_input_length=1000))


POOL: dict[str, Any] = {
    "page_size": 1,
    "dtype": torch.bfloat16,
    "layer_num": 3,
    "device": "cpu",
    "enable_memory_saver": False,
}


def test_pools_are_asked_for_their_bytes() -> None:
    heads = MHATokenToKVPool(100, head_num=2, head_dim=16, v_head_dim=8, enable_alt_stream=False, **POOL)
    assert pool_bytes(heads) == 101 * 3 * 2 * (16 + 8) * 2
    latent = MLATokenToKVPool(100, kv_lora_rank=32, qk_rope_head_dim=8, **POOL)
    assert pool_bytes(latent) == 101 * 3 * 40 * 2

    class OfParts(KVCache):  # type: ignore[misc]
        """A pool without a sum of its own, as DeepSeek V4's."""

        get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = None

        def __init__(self) -> None:
            self.parts, self.more = [torch.zeros(10), torch.zeros(4)], {"index": torch.zeros(2)}

    assert pool_bytes(OfParts()) == 4 * 16


def test_every_class_of_pools_of_sglangs_can_be_asked() -> None:
    """A new class fails here: look whether its bytes are counted and `admission.unsupported` knows it."""
    assert all(
        (deepseek_v4_memory_pool, hisparse_memory_pool, swa_memory_pool, unified_draft_pool, unified_memory_pool)
    )
    assert all((dsa_cache_layer_split, minimax_m3_nvfp4_pool, qsa_kv_pool))

    def below(kind: type) -> set[type]:
        return {kind}.union(*(below(one) for one in kind.__subclasses__()))

    kinds = {
        kind for kind in below(KVCache) if kind.__module__.startswith("sglang.") and "hardware" not in kind.__module__
    }
    asked = {kind.__name__ for kind in kinds if hasattr(kind, "get_kv_size_bytes")}
    assert {kind.__name__ for kind in kinds} - asked == {
        "KVCache",
        "BaseSWAKVPool",
        "DeepSeekV4SingleKVPool",
        "DeepSeekV4UniformFP8KVPool",
        "DeepSeekV4IndexerPool",
        "DeepSeekV4TokenToKVPool",
        "HiSparseC4DevicePool",
    }
    assert asked == {
        "DSATokenToKVPool",
        "HiSparseDSATokenToKVPool",
        "HiSparseMHAMainPool",
        "HybridLinearKVPool",
        "MHATokenToKOnlyPool",
        "MHATokenToKVPool",
        "MHATokenToKVPoolFP4",
        "MHATokenToKVPoolMXFP8",
        "LayerSplitDSATokenToKVPool",
        "MLATokenToKVPool",
        "MLATokenToKVPoolFP4",
        "MiniMaxM3Nvfp4IndexKPool",
        "MiniMaxM3Nvfp4KVPool",
        "MiniMaxM3Nvfp4MainKVPool",
        "MiniMaxSparseKVPool",
        "NoOpMHATokenToKVPool",
        "PageInterleaveDSATokenToKVPool",
        "PageInterleaveMHATokenToKVPool",
        "PageInterleaveMLATokenToKVPool",
        "PageMajorMHATokenToKVPool",
        "QSATokenToKVPool",
        "SWAKVPool",
        "UnifiedDraftKVPool",
        "UnifiedDraftSWAKVPool",
        "UnifiedHybridLinearKVPool",
        "UnifiedMHATokenToKVPool",
        "UnifiedMLATokenToKVPool",
        "UnifiedSWAKVPool",
    }
