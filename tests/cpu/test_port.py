"""The hook list against the installed SGLang, and the ways in which activation must fail."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastapi
import pytest
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

import sgl_prefill.port
from sgl_prefill.config import PrefillConfig
from sgl_prefill.entry import activation, fingerprints
from sgl_prefill.entry.hooks import FEATURES, HOOKS, fingerprinted_targets, hooks_for
from sgl_prefill.errors import BadRequestError, SeamError
from sgl_prefill.http import routes
from sgl_prefill.http.shutdown import Ending


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
        ("sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__", ["self"]),
        (
            "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
            ["self", "hidden_states", "lm_head", "embedding_bias", "out"],
        ),
    ],
)
def test_hook_targets_take_the_parameters_that_we_use(target: str, parameters: list[str]) -> None:
    """An upstream change of a signature shows here by name."""
    assert list(inspect.signature(pkgutil.resolve_name(target)).parameters) == parameters


def test_source_that_is_read_from_a_file_is_what_inspect_gives() -> None:
    """Of methods, whose module cannot be imported everywhere: decorators included, and neither a line more nor less."""
    targets = [
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.forward_extend",
        "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.forward_decode",
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
    ]
    for target in targets:
        read = fingerprints.source_from_file(target, target.rsplit(".", 2)[0])
        assert read == inspect.getsource(inspect.unwrap(pkgutil.resolve_name(target)))
    assert (
        fingerprints.fingerprint(f"{fingerprints.NEEDS_A_DEVICE[0]}FlashAttentionBackend.no_such_method") == "missing"
    )


def test_the_lists_say_everything_once_and_why() -> None:
    """Features and processes may share a hooked function; what is overridden is not also called."""
    overrides = [one for feature in FEATURES for one in feature.overrides]
    patches = [one for feature in FEATURES for one in feature.patches]
    relied = [one for feature in FEATURES for one in feature.relied]
    relied_targets = [target for one in relied for target in one.targets]
    overridden = [(target, one.by) for one in overrides for target in one.targets]
    for entries in (
        [hook.target for hook in HOOKS],
        [route.path for route in routes.ROUTES],
        [*{route.stock_endpoint for route in routes.ROUTES}, *relied_targets],
        overridden,
        [(one.owner, attribute) for one in patches for attribute in one.attributes],
    ):
        assert len(set(entries)) == len(entries)
    assert not {target for target, _ in overridden} & set(relied_targets)
    declared: list[Any] = [*HOOKS, *overrides, *patches, *relied]
    assert all(entry.reason.endswith(".") and len(entry.reason.split()) > 3 for entry in declared)


def test_hooks_and_patches_stay_few() -> None:
    """Each makes every release of SGLang dearer."""
    assert len(HOOKS) <= 36
    assert sum(len(patch.attributes) for feature in FEATURES for patch in feature.patches) <= 47


NEEDS_A_DEVICE = "shared_prefix_fa3"  # its import does


def our_classes() -> Iterator[type]:
    """Every class of this package."""
    for module in pkgutil.walk_packages(sgl_prefill.__path__, "sgl_prefill."):
        if module.name.endswith((".preloaded", ".build", ".kernels", NEEDS_A_DEVICE)) or ".examples" in module.name:
            continue
        for found in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(found) and found.__module__ == module.name:
                yield found


def test_every_override_is_declared_and_every_declared_one_is_there() -> None:
    """Of methods that a subclass of ours defines and its base of SGLang's does too, but for interfaces made for that."""
    made_for_it = ("Platform", "AttentionBackend", "DeviceMixin", "Request", "GenerateReqInput", "BaseModel")
    found = set()
    for ours in our_classes():
        for base in ours.__mro__[1:]:
            if base.__module__.startswith("sglang.") and not base.__name__.endswith(made_for_it):
                found |= {
                    (name, ours.__name__)
                    for name, value in vars(ours).items()
                    if inspect.isfunction(getattr(value, "fget", value))
                    and name in vars(base)
                    and name != "__subclasshook__"
                }
    overrides = [one for feature in FEATURES for one in feature.overrides]
    declared = {(method, one.by) for one in overrides for method in one.methods}
    file = Path(sgl_prefill.__file__).parent / "port/runner" / f"{NEEDS_A_DEVICE}.py"
    (ours_there,) = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    methods = {node.name for node in ours_there.body if isinstance(node, ast.FunctionDef)}
    not_sglangs = {"_plan", "_attend"}
    assert found | {(name, ours_there.name) for name in methods - not_sglangs} == declared


def test_every_attribute_that_is_set_on_sglangs_objects_is_declared() -> None:
    """Assignments to attributes of anything but `self` and our own objects, found in the source of the port and of the CPU
    platform. What an attribute is called is SGLang's: one that it renames is not in the source of its owner any more."""
    ours = {
        "record",
        "logger",
        "parts",
        "ours",
        "self",
        "request_state",
        "state",
        "hybrid",
        "session",
        "method",
        "node",
        "linear",
        "product",
        "server_args",
        "budget",
        "rows",
        "job",
    }
    found = set()
    package = Path(sgl_prefill.__file__).parent
    for file in [*(package / "port").rglob("*.py"), *(package / "entry").glob("*.py"), *(package / "cpu").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            alone: Any = getattr(node, "target", None)
            targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [alone]
            for target in targets:
                elements: list[Any] = target.elts if isinstance(target, ast.Tuple) else [target]
                for element in elements:
                    if isinstance(element, ast.Attribute):
                        root = element.value
                        while isinstance(root, ast.Attribute | ast.Call):
                            root = root.value if isinstance(root, ast.Attribute) else root.func
                        if isinstance(root, ast.Name) and root.id not in ours:
                            found.add(element.attr)
    patches = [(one.owner, name) for feature in FEATURES for one in feature.patches for name in one.attributes]
    assert found - {name for _, name in patches} == KNOWN_AS_OURS
    for path, name in patches:
        owner = pkgutil.resolve_name(path)
        is_ours = name.startswith("sgl_prefill")
        module = inspect.getmodule(owner)
        assert module is not None
        is_known = is_ours or hasattr(owner, name) or name in inspect.getsource(module)
        assert is_known, f"{path} knows no {name}"


# Set on objects that are ours, through a name that does not say so.
KNOWN_AS_OURS = {"only_last_block", "is_of_server", "is_in_place", "shares_prefixes"}


def test_every_environment_switch_that_is_set_is_declared() -> None:
    """`envs.NAME.set(...)`, found in the source; and SGLang knows each."""
    package = Path(sgl_prefill.__file__).parent
    found = {name for file in package.rglob("*.py") for name in re.findall(r"\benvs\.(\w+)\.set\(", file.read_text())}
    assert found == {name for feature in FEATURES for name in feature.switches}
    assert all(hasattr(envs, name) for name in found)


def test_only_four_rooms_know_sglang() -> None:
    """By what their modules import, types included; examples are programs of users."""
    package = Path(sgl_prefill.__file__).parent
    knowing = set()
    for file in package.rglob("*.py"):
        if "examples" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "sglang" for name in names):
                knowing.add(file.relative_to(package))
    assert {path.parts[0] for path in knowing} == {"port", "cpu", "http", "entry"}
    assert len(knowing) <= 55


@pytest.mark.usefixtures("clean_registry")
def test_with_our_features_off_only_what_surrounds_a_forward_pass_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each technique has its own switch; with all off, what computes an answer on a GPU is SGLang's."""
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: True)
    off = PrefillConfig(
        scheduling="stock",
        logits_dtype="model",
        hybrid_prefill="off",
        suffix_kv="keep",
        shared_prefix_attention="off",
    )
    left = [
        hook.target.rsplit(".", 1)[1]
        for process in ("http", "detokenizer", "scheduler")
        for hook in hooks_for(off, process)
    ]
    about_times_and_replies = [*(3 * ["__getstate__"]), "convert_to_output_meta_info"]
    about_memory = [
        "_profile_available_bytes",
        "get_worker_info",
        "run_batch",
        "process_batch_result",
    ]
    about_tenants = ["__init__"]
    about_labels = ["move_logprobs_to_cpu"]
    about_long_labels = ["_build_req_to_token_pool", "forward_batch_generation", "forward", "forward", "can_run_graph"]
    about_model_faults = ["init_attention_backends"]
    about_starts = ["_set_envs_and_config", "__init__", "_resolve_dist_init_method"]
    about_conversations = ["_process_messages"]
    about_the_dashboard = ["get_internal_state"]
    assert sorted(left) == sorted(
        about_times_and_replies
        + about_memory
        + about_tenants
        + about_labels
        + about_long_labels
        + about_starts
        + about_model_faults
        + about_conversations
        + about_the_dashboard
    )


@pytest.mark.usefixtures("clean_registry")
def test_activation_wraps_every_target_and_writes_the_record() -> None:
    """What the record names is what is in place."""
    written = activation.activate(PrefillConfig(fairness_lambda=7.0), "scheduler").record.shown()
    assert written["hooks"] == [hook.target for hook in hooks_for(PrefillConfig(), "scheduler")]
    assert written["config"]["fairness_lambda"] == 7.0
    for hook in hooks_for(PrefillConfig(), "scheduler"):
        assert activation.is_wrapped_by(pkgutil.resolve_name(hook.target), activation.registered(hook))


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
        fingerprints, "fingerprint", lambda target: "missing" if target.endswith("get_internal_state") else "0"
    )
    with pytest.raises(SeamError) as caught:
        fingerprints.check_source()
    message = str(caught.value)
    assert "Scheduler.get_internal_state does not exist" in message
    assert "Scheduler.get_new_batch_prefill differs" in message
    assert "pip install" in message


def test_an_unsupported_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, supported, and the command that mends it."""
    monkeypatch.setattr(fingerprints, "installed_sglang_version", lambda: "0.5.24")
    assert fingerprints.version_problem() == (
        "SGLang 0.5.24 is installed, and this package hooks into 0.5.23 only: run `pip install sglang==0.5.23`"
    )


def test_no_reply_puts_a_warning_into_the_log() -> None:
    """80 requests with odd fields had left 14 lines of 400 characters: SGLang's and ours answered with a deprecated class."""
    from sglang.srt.entrypoints import http_server

    app = fastapi.FastAPI()
    app.router.routes = list(http_server.app.router.routes)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        routes.install(app, PrefillConfig(), Ending())
        http_server._create_error_response(ValueError("SGLang's"))
        refused = asyncio.run(routes.answer_bad_request(fastapi.Request({"type": "http"}), BadRequestError("ours")))
    assert [str(one.message) for one in shown] == []
    assert refused.status_code == 400


def test_the_routes_that_are_kept_are_sglangs() -> None:
    """One that SGLang renames would be a 404."""
    from sglang.srt.entrypoints import http_server

    stock = set().union(*map(routes.paths_of, http_server.app.router.routes))
    assert stock >= routes.KEPT_ROUTES
