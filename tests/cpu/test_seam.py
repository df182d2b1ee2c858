"""The hook list against the installed SGLang, and the ways in which activation must fail."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sgl_prefill.config import PrefillConfig
from sgl_prefill.errors import SeamError
from sgl_prefill.seam import activation, fingerprints
from sgl_prefill.seam.hooks import HOOKS, RELIED_UPON, ROUTES, fingerprinted_targets, hooks_for


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """Restores the hook registry and every hooked function."""
    originals = {hook.target: pkgutil.resolve_name(hook.target) for hook in HOOKS}
    HookRegistry.reset()
    yield
    HookRegistry.reset()
    for target, original in originals.items():
        owner, name = target.rsplit(".", 1)
        setattr(pkgutil.resolve_name(owner), name, original)


def test_every_target_is_as_recorded() -> None:
    """The installed SGLang is the source that the hooks were written against."""
    assert fingerprints.differing(fingerprinted_targets()) == []


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("sglang.srt.managers.scheduler.Scheduler.init_schedule_policy", ["self"]),
        ("sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill", ["self", "running_batch"]),
        ("sglang.srt.managers.scheduler.Scheduler.get_init_info", ["self"]),
        ("sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__", ["self"]),
        (
            "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
            ["self", "hidden_states", "lm_head", "embedding_bias"],
        ),
    ],
)
def test_hook_targets_take_the_parameters_that_we_use(target: str, parameters: list[str]) -> None:
    """An upstream change of a signature shows here by name."""
    assert list(inspect.signature(pkgutil.resolve_name(target)).parameters) == parameters


def test_the_list_is_complete_and_says_why() -> None:
    """Each hook, route and relied-upon function appears once and carries its reason; features and processes may share one."""
    hooks = [(hook.target, hook.process, hook.feature) for hook in HOOKS]
    others = [*(route.stock_endpoint for route in ROUTES), *(relied.target for relied in RELIED_UPON)]
    assert len(set(hooks)) == len(hooks)
    assert len(set(others)) == len(others)
    assert set(fingerprinted_targets()) == {*(target for target, *_ in hooks), *others}
    assert all([*(h.reason for h in HOOKS), *(r.reason for r in ROUTES), *(r.reason for r in RELIED_UPON)])


@pytest.mark.usefixtures("clean_registry")
def test_with_our_features_off_only_what_surrounds_a_forward_pass_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each technique has its own switch; with all off, what computes an answer on a GPU is SGLang's."""
    monkeypatch.setattr("sgl_prefill.seam.hooks.has_accelerator", lambda: True)
    off = PrefillConfig(scheduling="stock", logits_dtype="model", hybrid_prefill="off", suffix_kv="keep")
    left = [
        hook.target.rsplit(".", 1)[1]
        for process in ("http", "detokenizer", "scheduler")
        for hook in hooks_for(off, process)
    ]
    about_times_and_replies = [*(3 * ["__getstate__"]), "convert_to_output_meta_info", "get_init_info"]
    about_memory = [
        "_profile_available_bytes",
        "get_worker_info",
        "run_batch",
        "process_batch_result",
    ]
    assert sorted(left) == sorted(about_times_and_replies + about_memory)


@pytest.mark.usefixtures("clean_registry")
def test_activation_wraps_every_target_and_writes_the_record() -> None:
    """What the record names is what is in place."""
    from sgl_prefill.seam import record

    activation.activate(PrefillConfig(fairness_lambda=7.0), "scheduler")
    written = record.read()
    assert written is not None
    assert written["hooks"] == [hook.target for hook in hooks_for(PrefillConfig(), "scheduler")]
    assert written["config"]["fairness_lambda"] == 7.0
    for hook in hooks_for(PrefillConfig(), "scheduler"):
        assert activation._is_wrapped_by(pkgutil.resolve_name(hook.target), hook.function)


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("whole_class", [False, True])
def test_a_foreign_plugin_on_our_target_is_refused_by_name(whole_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plugins around one function, or one that replaced its class: whose engine would be measured?"""
    from sglang.srt.managers import scheduler

    foreign = HookSource("other_plugin", "other-dist")
    if whole_class:
        monkeypatch.setattr(scheduler, "Scheduler", scheduler.Scheduler)
        target, hook, kind = "sglang.srt.managers.scheduler.Scheduler", scheduler.Scheduler, HookType.REPLACE
    else:
        target, kind = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill", HookType.BEFORE
        hook = lambda *args, **kwargs: None  # noqa: E731
    HookRegistry.register(target, hook, kind, source=foreign)
    with pytest.raises(SeamError, match="get_new_batch_prefill is also hooked by other_plugin"):
        activation.activate(PrefillConfig(), "scheduler")


@pytest.mark.usefixtures("clean_registry")
def test_a_hook_that_sglang_did_not_apply_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs and swallows errors while applying hooks; then the engine would look like stock."""
    monkeypatch.setattr(HookRegistry, "apply_hooks", classmethod(lambda cls: None))
    with pytest.raises(SeamError, match="was not wrapped"):
        activation.activate(PrefillConfig(), "scheduler")


def test_a_changed_or_missing_target_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """All differences stand in one message, with the remedy."""
    monkeypatch.setattr(
        fingerprints, "fingerprint", lambda target: "missing" if target.endswith("get_init_info") else "0"
    )
    with pytest.raises(SeamError) as caught:
        fingerprints.check_source()
    message = str(caught.value)
    assert "Scheduler.get_init_info does not exist" in message
    assert "Scheduler.get_new_batch_prefill differs" in message
    assert "pip install" in message


def test_an_unsupported_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, supported, and the command that mends it."""
    monkeypatch.setattr(fingerprints, "installed_sglang_version", lambda: "0.5.23")
    assert fingerprints.version_problem() == (
        "SGLang 0.5.23 is installed, and this package hooks into 0.5.17 only: run `pip install sglang==0.5.17`"
    )


def test_importing_the_package_loads_neither_torch_nor_sglang() -> None:
    """The core runs where neither is installed: both are blocked here."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n"
        "import sgl_prefill, sgl_prefill.config, sgl_prefill.errors\n"
        "import sgl_prefill.core.jct, sgl_prefill.core.srjf, sgl_prefill.core.labels\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
