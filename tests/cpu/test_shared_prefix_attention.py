"""Shared-prefix attention on a GPU: what its kernels are given to launch, executed by loops, against each request alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers import radix_attention
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope
from sglang.srt.runtime_context import get_context

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.shared_groups import Group
from sgl_prefill.entry.hooks import hooks_for
from sgl_prefill.errors import ConfigurationError
from sgl_prefill.gpu import plans, two_parts
from sgl_prefill.port.runner import shared_prefix_attention, shared_prefixes
from sgl_prefill.port.runner.shared_prefix_attention import (
    SharedPrefixFlashInfer,
    SharedPrefixTriton,
    Sharing,
    serves_layer,
)
from tests.support import sharing_steps, slow_attention
from tests.support.sharing_steps import SharingStep

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("published")
CLOSE = 1e-5  # float32, sums in another order


def sharing_steps_of(page_tokens: list[int], n_nodes: int = 0) -> st.SearchStrategy[SharingStep]:
    return st.builds(
        lambda seed, page: sharing_steps.make(
            seed, page_tokens=page, most_tokens=max(200, 4 * page), n_nodes=n_nodes if page == 1 else 0
        ),
        st.integers(0, 10**6),
        st.sampled_from(page_tokens),
    )


@pytest.fixture(scope="module")
def no_stock_plans() -> Any:
    """SGLang's own plans are not made: they need a device."""
    with pytest.MonkeyPatch.context() as patch:
        for stock in (TritonAttnBackend, FlashInferAttnBackend):
            patch.setattr(stock, "init_forward_metadata", lambda *_: None)
        cascade: Any = ModuleType("flashinfer.cascade")
        cascade.merge_state_in_place = slow_attention.flashinfer_merge_in_place
        patch.setitem(sys.modules, "flashinfer.cascade", cascade)
        yield


def triton_backend(step: SharingStep) -> Any:
    backend: Any = SharedPrefixTriton.__new__(SharedPrefixTriton)
    backend.sharing, backend._merge = Sharing(step.runner(), "on"), slow_attention.merge_state
    backend.extend_attention_fwd, backend.page_size = slow_attention.extend_attention_fwd, step.page_tokens
    backend.token_to_kv_pool = step.pool()
    return backend


def flashinfer_backend(step: SharingStep) -> Any:
    backend: Any = SharedPrefixFlashInfer.__new__(SharedPrefixFlashInfer)
    backend.sharing = Sharing(step.runner(), "on")
    backend._shared_kernel, backend._own_kernel = slow_attention.FlashInferPaged(), slow_attention.FlashInferPaged()
    backend.token_to_kv_pool, backend.num_wrappers, backend.enable_mis = step.pool(), 1, False
    backend.indices_updater_prefill = SimpleNamespace(
        num_qo_heads=4, num_kv_heads=2, head_dim=8, q_data_type=torch.float32, data_type=torch.float32
    )
    return backend


def plans_two_parts(backend: Any, batch: Any) -> bool:
    backend.init_forward_metadata(batch)
    return backend._planned is not None


def attended(backend: Any, step: SharingStep, *, is_written: bool) -> torch.Tensor | None:
    """The output of a step in two parts, None where it is none. is_written: K and V are in the pool, as hybrid prefilling has
    them, and the output has its place."""
    batch = step.batch()
    backend.init_forward_metadata(batch)
    if backend._planned is None:
        return None
    key, value = (x[step.new_slots] for x in (step.keys, step.values))
    if is_written:
        backend.token_to_kv_pool.set_kv_buffer(None, SimpleNamespace(loc=step.new_slots), key, value)
        batch._attn_output = torch.empty_like(step.query)
    found: torch.Tensor = backend.forward(step.query, key, value, step.layer, batch, save_kv_cache=not is_written)
    return found


@pytest.mark.usefixtures("no_stock_plans")
@pytest.mark.parametrize("make_backend", [triton_backend, flashinfer_backend])
@pytest.mark.parametrize("is_written", [False, True])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_two_parts_are_the_attention_of_each_request(make_backend: Any, is_written: bool, data: st.DataObject) -> None:
    """Several groups, lone and cold requests among them, cached tokens behind the shared ones, answers behind new tokens."""
    step = data.draw(sharing_steps_of([1, 1, 16, 64, 128], n_nodes=4 if is_written else 0))
    found = attended(make_backend(step), step, is_written=is_written)
    if found is not None:
        torch.testing.assert_close(found.view_as(step.query), step.expected(), rtol=CLOSE, atol=CLOSE)


@settings(deadline=None, max_examples=100)
@given(step=sharing_steps_of([1, 16, 64, 128], n_nodes=3))
def test_every_position_is_read_by_each_query_once(step: SharingStep) -> None:
    """Of the two parts: rows hold the queries in order, and a request's shared and own positions are all up to its last one."""
    piece = two_parts.piece_tokens(step.page_tokens)
    table = plans.SlotTable(step.table, torch.tensor(step.rows))
    slots = plans.last_slots(table, max(step.cached), piece)
    parts = two_parts.divide(two_parts.groups_by_pieces(slots, step.cached, piece, 1), step.cached, step.new)
    if parts is None:
        return
    shared_of_query = [0] * sum(step.new)
    start = parts.first_shared_query
    for n_queries, n_kv in zip(parts.shared.query_tokens, parts.shared.kv_tokens, strict=True):
        shared_of_query[start : start + n_queries] = [n_kv] * n_queries
        start += n_queries
    assert start == parts.shared_queries.stop
    assert parts.own.query_tokens == step.new
    query = 0
    for n_cached, n_new, first, n_kv in zip(
        step.cached, step.new, parts.own.first_positions, parts.own.kv_tokens, strict=True
    ):
        assert first % step.page_tokens == 0
        assert first + n_kv == n_cached + n_new
        assert shared_of_query[query : query + n_new] == [first] * n_new
        query += n_new


def child(kind: str) -> None:
    """In a process of its own: what is imported there is not what others shall import."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cpu.shared_prefix_child", kind],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sglangs_triton_kernels_compute_the_two_parts() -> None:
    """Its own kernels in Triton's interpreter, against float32 attention."""
    child("triton")


def test_the_calls_of_flash_attention_3_are_the_attention_of_each_request() -> None:
    """Our subclass of SGLang's backend, with loops in the place of the kernels that need a device."""
    child("fa3")


def groups_of(*members: tuple[int, ...], shared_tokens: int) -> list[Group]:
    return [Group(each, shared_tokens if len(each) > 1 else 0) for each in members]


def test_a_step_is_divided_by_runs_of_neighbours() -> None:
    """By hand: B stands between two of A's, the cold one before them is in no row, and the lone one between reads nothing."""
    groups = groups_of((1, 2, 4), (0,), (3,), shared_tokens=100)
    parts = two_parts.divide(groups, [0, 100, 130, 50, 100], [7, 1, 2, 3, 4])
    assert parts is not None
    assert parts.shared == two_parts.Part([1, 3, 4], [3, 3, 4], [0, 0, 0], [100, 0, 100])
    assert parts.own == two_parts.Part([0, 1, 2, 3, 4], [7, 1, 2, 3, 4], [0, 100, 100, 0, 100], [7, 1, 32, 53, 4])
    assert parts.shared_queries == slice(7, 17)
    assert parts.saved_positions == 100, "of three readers two read together"


LAYER_OF_8B = two_parts.LayerBytes(kv_position=4_096, output_token=8_192)


@pytest.mark.parametrize(
    ("n_requests", "n_shared", "n_new", "is_worth_it"),
    [
        (50, 14_000, 15, True),
        (50, 14_000, 150, True),
        (2, 14_000, 15, False),
        (50, 1_000, 15, False),
        (1, 14_000, 15, False),
    ],
)
def test_two_parts_run_where_they_gain(n_requests: int, n_shared: int, n_new: int, is_worth_it: bool) -> None:
    """The paper's workload gains; two requests, or a thousand tokens, do not pay for the launches and the merge. Of one rank of
    eight each position saves an eighth, which must still pay for whole launches."""
    members = tuple(range(n_requests))
    parts = two_parts.divide(groups_of(members, shared_tokens=n_shared), [n_shared] * n_requests, [n_new] * n_requests)
    assert (parts is not None and two_parts.are_worth_it(parts, LAYER_OF_8B)) == is_worth_it
    eighth = two_parts.LayerBytes(*(n_bytes // 8 for n_bytes in LAYER_OF_8B))
    is_large = n_requests * n_shared >= 8 * 50_000
    assert (parts is not None and two_parts.are_worth_it(parts, eighth)) == (is_worth_it and is_large)


def test_the_bytes_of_a_layer_are_those_of_one_rank() -> None:
    runner = sharers().runner()
    assert shared_prefix_attention.layer_bytes(runner) == LAYER_OF_8B
    runner.token_to_kv_pool.head_num = 1
    with get_context().override_server_args(tp_size=8):
        assert shared_prefix_attention.layer_bytes(runner) == (512, 1_024)


def plan_of(step: SharingStep, switch: str, **changed: Any) -> Any:
    return Sharing(step.runner(), switch).plan(step.batch(**changed), lambda table, parts: parts)


def sharers(n_requests: int = 4, n_shared: int = 128) -> SharingStep:
    """All behind one prefix, with two tokens each."""
    n_slots = 1 + n_shared + 2 * n_requests
    shared = torch.arange(1, 1 + n_shared)
    own = torch.arange(1 + n_shared, n_slots).view(n_requests, 2)
    table = torch.cat((shared.expand(n_requests, n_shared), own), dim=1).int()
    keys, values = torch.randn(2, n_slots, sharing_steps.KV_HEADS, 8)
    query = torch.randn(2 * n_requests, sharing_steps.HEADS * 8)
    lens = [n_shared] * n_requests, [2] * n_requests
    return SharingStep(1, table, list(range(n_requests)), *lens, query, keys, values)


def test_only_plain_extends_run_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else keeps the stock path: decode, mixed steps, drafts, encoders, several items, custom masks, padding."""
    step = sharers()
    assert plan_of(step, "on") is not None
    assert plan_of(step, "auto") is None, "128 tokens gain nothing"
    others: list[dict[str, Any]] = [
        *({"forward_mode": mode} for mode in (ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)),
        *({name: object()} for name in ("spec_info", "encoder_lens", "multi_item_delimiter_indices")),
        *({name: object()} for name in ("cross_attention_custom_mask", "global_num_tokens_cpu")),
        {"extend_prefix_lens_cpu": None},
    ]
    for other in others:
        assert plan_of(step, "on", **other) is None, other
    monkeypatch.setattr(two_parts, "MOST_SHARED_QUERY_TOKENS", 7)
    assert plan_of(step, "on") is None, "the output of eight queries would be more than is allowed"


def test_the_device_is_not_asked_where_nobody_can_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading slots waits for the device: cold prompts, a lone hit and short hits cost nothing."""
    monkeypatch.setattr(plans, "last_slots", lambda *_: pytest.fail("the device was asked"))
    for cached in ([0, 0, 0, 0], [128, 0, 0, 0], [63, 63, 63, 63]):
        step = sharers()
        assert plan_of(step, "on", extend_prefix_lens_cpu=cached) is None
    assert plan_of(sharers(n_shared=1_023), "auto") is None


LAYERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sliding_window_size": 128}, {}),
    ({"attn_type": AttentionType.ENCODER_ONLY}, {}),
    ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}),
    ({"is_cross_attention": True}, {}),
    ({"v_head_dim": 4}, {}),
    ({"use_irope": True}, {}),
    ({"logit_cap": 30.0, "logit_capping_method": "other"}, {}),
    ({}, {"sinks": object()}),
    ({}, {"q_rope": object()}),
]


@pytest.mark.parametrize(("layer", "options"), LAYERS)
def test_layers_that_two_parts_do_not_compute_keep_the_stock_path(
    layer: dict[str, Any], options: dict[str, Any]
) -> None:
    assert serves_layer(RadixAttention(4, 8, 0.3, 2, 0, logit_cap=30.0), {"sinks": None})
    assert not serves_layer(RadixAttention(4, 8, 0.3, 2, 0, **layer), options)
    scaled = RadixAttention(4, 8, 0.3, 2, 0)
    scaled.k_scale = torch.ones(1)
    assert not serves_layer(scaled, {}), "K is stored in FP8"


@pytest.mark.usefixtures("no_stock_plans")
def test_a_layer_of_the_stock_path_gets_it_in_a_step_of_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window among full layers, and a soft cap where flashinfer compiles none in."""
    step = sharers()
    for make_backend, stock, layer in (
        (triton_backend, TritonAttnBackend, RadixAttention(4, 8, 0.3, 2, 0, sliding_window_size=128)),
        (flashinfer_backend, FlashInferAttnBackend, RadixAttention(4, 8, 0.3, 2, 0, logit_cap=30.0)),
    ):
        monkeypatch.setattr(stock, "forward_extend", lambda *_, **__: "stock")
        backend: Any = make_backend(step)
        batch = step.batch()
        backend.init_forward_metadata(batch)
        assert backend._planned is not None
        assert backend.forward(step.query, step.keys, step.values, layer, batch, save_kv_cache=False) == "stock"


@pytest.mark.usefixtures("no_stock_plans")
@pytest.mark.parametrize("make_backend", [triton_backend, flashinfer_backend])
def test_a_replayed_graph_attends_in_two_parts_between_its_pieces(
    make_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang plans anew before a replay and breaks the graph at each attention, whose rows it pads to those that were captured:
    hits run so. What it captured, without cached prefixes, was in one part; what is padding becomes zero."""
    step, n_padding = sharers(), 5
    n_new = len(step.query)
    backend = make_backend(step)
    monkeypatch.setattr(radix_attention, "get_attn_backend", lambda: backend)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows, rows[:n_padding]))

    slots = torch.cat((step.new_slots, torch.zeros(n_padding, dtype=torch.int64)))
    output = torch.full_like(padded(step.query), torch.nan)
    with enable_breakable_cuda_graph():
        assert not plans_two_parts(backend, step.batch(extend_prefix_lens_cpu=[0] * len(step.rows)))
        batch = step.batch(
            out_cache_loc=slots,
            positions=None,
            global_num_token_non_padded_cpu=n_new,
            mha_return_lse=False,
            _attn_output=None,
        )
        assert plans_two_parts(backend, batch)
        with set_forward_batch(batch), prefill_graph_scope(full_graph=False, raw_num_tokens=n_new):
            rows = (padded(x) for x in (step.query, step.keys[step.new_slots], step.values[step.new_slots]))
            RadixAttention._eager_attention(step.layer, *rows, output)
    torch.testing.assert_close(output[:n_new], step.expected(), rtol=CLOSE, atol=CLOSE)
    assert not output[n_new:].any()


@pytest.mark.usefixtures("no_stock_plans")
@pytest.mark.parametrize(
    ("make_backend", "stock"), [(triton_backend, TritonAttnBackend), (flashinfer_backend, FlashInferAttnBackend)]
)
def test_other_queries_than_those_that_were_planned_get_the_stock_path(
    make_backend: Any, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of padding that SGLang has not cut away, a plan that another pass has left, and layers that hand over no K and V."""
    monkeypatch.setattr(stock, "forward_extend", lambda *_, **__: "stock")
    step = sharers()
    backend = make_backend(step)
    batch = step.batch()
    backend.init_forward_metadata(batch)
    for n_more in (-1, 1):
        query = torch.cat((step.query, step.query))[: len(step.query) + n_more]
        assert backend.forward(query, step.keys, step.values, step.layer, batch, save_kv_cache=False) == "stock"
    assert backend.forward(step.query, None, None, step.layer, batch, save_kv_cache=False) == "stock", (
        "another layer's K"
    )


@pytest.mark.usefixtures("no_stock_plans")
@pytest.mark.parametrize("make_backend", [triton_backend, flashinfer_backend])
def test_a_graph_of_a_whole_step_forgets_the_plan_of_the_last_one(
    make_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stock in (TritonAttnBackend, FlashInferAttnBackend):
        monkeypatch.setattr(stock, "init_forward_metadata_out_graph", lambda *_: None)
    step = sharers()
    backend = make_backend(step)
    backend.init_forward_metadata(step.batch())
    assert backend._planned is not None
    backend.init_forward_metadata_out_graph(step.batch())
    assert backend._planned is None


def runner(**changed: Any) -> Any:
    """A model runner that two parts can serve, but for what is changed; a dotted name is a field of a field."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool: Any = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.dtype = torch.bfloat16
    found = SimpleNamespace(
        use_mla_backend=False,
        token_to_kv_pool=pool,
        dtype=torch.bfloat16,
        token_to_kv_pool_allocator=SimpleNamespace(),
        model_config=SimpleNamespace(is_encoder_decoder=False, is_local_attention_model=False),
        is_draft_worker=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        server_args=SimpleNamespace(enable_deterministic_inference=False, enable_two_batch_overlap=False, dcp_size=1),
    )
    for name, value in changed.items():
        owner, _, field = name.rpartition("__")
        setattr(getattr(found, owner) if owner else found, field, value)
    return found


@pytest.mark.parametrize(
    "changed",
    [
        {"use_mla_backend": True},
        {"token_to_kv_pool": SimpleNamespace()},
        {"token_to_kv_pool__dtype": torch.float8_e4m3fn},
        {"token_to_kv_pool_allocator__translate_kv_loc": print},
        {"model_config__is_encoder_decoder": True},
        {"model_config__is_local_attention_model": True},
        {"is_draft_worker": True},
        {"spec_algorithm__is_none": lambda: False},
        {"server_args__enable_deterministic_inference": True},
        {"server_args__enable_two_batch_overlap": True},
        {"server_args__dcp_size": 2},
    ],
)
def test_what_two_parts_cannot_serve_gets_sglangs_own_backend(changed: dict[str, Any]) -> None:
    makers = shared_prefix_attention
    assert makers._make(lambda _: "stock", lambda *_: "ours", "on", runner()) == "ours"
    assert makers._make(lambda _: "stock", lambda *_: "ours", "auto", runner(**changed)) == "stock"
    with pytest.raises(ConfigurationError, match=r"is on, and .* flashinfer, fa3 and triton"):
        makers._make(lambda _: "stock", lambda *_: "ours", "on", runner(**changed))


def test_the_switch_puts_our_backends_under_sglangs_names_and_takes_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice on, as a second engine of a process, and off again: SGLang's makers are back, and none is wrapped twice."""
    names = ("flashinfer", "fa3", "triton")
    stock = [ATTENTION_BACKENDS[name] for name in names]
    for switch in ("auto", "on"):
        shared_prefix_attention.register(switch)
        assert [ATTENTION_BACKENDS[name].args[0] for name in names] == stock
        assert {ATTENTION_BACKENDS[name].args[2] for name in names} == {switch}
    shared_prefix_attention.register("off")
    assert [ATTENTION_BACKENDS[name] for name in names] == stock


class Node:
    def __init__(self, parent: Node | None = None) -> None:
        self.parent = parent


def test_sharers_become_neighbours_at_every_depth_of_the_tree() -> None:
    """In the order in which subtrees were picked; requests without a tree, as the start's own, keep theirs."""
    root = Node()
    a, b = Node(root), Node(root)
    a1, a2 = Node(a), Node(a)
    picked = {"b": b, "a1": a1, "b'": b, "a2": a2, "a": a, "a1'": a1}
    requests: list[Any] = [SharingRequest(name, last) for name, last in picked.items()]
    order = [req.name for req in shared_prefixes.in_prefix_order(requests)]
    assert order == ["b", "b'", "a", "a1", "a1'", "a2"]
    alone: list[Any] = [SharingRequest(name, None) for name in "cab"]
    assert shared_prefixes.in_prefix_order(alone) == alone


class SharingRequest:
    def __init__(self, name: str, last_node: Node | None) -> None:
        self.name, self.last_node = name, last_node
        self.output_ids: list[int] = []


def test_the_batch_of_a_step_is_made_of_its_requests_in_that_order() -> None:
    """And of nothing else than SGLang has said."""
    root = Node()
    a, b = Node(root), Node(root)
    requests: list[Any] = [SharingRequest(str(place), last) for place, last in enumerate((a, b, a))]
    made: Any = shared_prefixes.around_init_new(
        lambda *given, **options: (given, options), list, requests, 1, chunked_req=2
    )
    assert made == ((list, [requests[0], requests[2], requests[1]], 1), {"chunked_req": 2})


def test_a_batch_of_those_who_write_keeps_its_order() -> None:
    """SGLang makes one of requests whose numbers it lists beside it (`_build_hisparse_decode_batch`)."""
    root = Node()
    a, b = Node(root), Node(root)
    requests: list[Any] = [SharingRequest(str(place), last) for place, last in enumerate((a, b, a))]
    requests[1].output_ids = [7]
    made: Any = shared_prefixes.around_init_new(lambda _, reqs: reqs, list, requests)
    assert made == requests


def both_of(prefill: Any, decode: Any) -> Any:
    """SGLang's object that picks by the kind of pass."""
    both: Any = HybridAttnBackend.__new__(HybridAttnBackend)
    both.prefill_backend, both.decode_backend = prefill, decode
    return both


def checked(switch: str, backend: Any) -> None:
    runner: Any = SimpleNamespace(attn_backend=backend)
    shared_prefixes.set_up(switch, runner)


def test_on_is_refused_where_no_kernel_reads_a_prefix_for_several() -> None:
    """By name of what attends, with what can: a backend of SGLang's that we have not extended, and a CPU without native
    kernels. What can is taken as it is, behind SGLang's object for two backends too."""
    for cannot in (TritonAttnBackend.__new__(TritonAttnBackend), SimpleNamespace(shares_prefixes=True, kernels=None)):
        for backend in (cannot, both_of(cannot, SimpleNamespace(sharing=object()))):
            with pytest.raises(
                ConfigurationError, match=r"(SimpleNamespace|TritonAttnBackend) attends.* flashinfer, fa3 and triton"
            ):
                checked("on", backend)
            checked("off", backend)
    for can in (triton_backend(sharers()), SimpleNamespace(shares_prefixes=True, kernels=object())):
        checked("on", can)
        checked("on", both_of(can, SimpleNamespace()))


@pytest.mark.parametrize(
    ("has_accelerator", "switch", "expected"),
    [
        (False, "auto", set()),
        (False, "on", set()),
        (False, "off", set()),
        (True, "auto", set()),
        (True, "on", {"around_init_new"}),
        (True, "off", set()),
    ],
)
def test_one_switch_is_for_both_kinds_of_machine(
    has_accelerator: bool, switch: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is as SGLang or as the CPU kernel has it, is not hooked."""
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: has_accelerator)
    config = PrefillConfig(shared_prefix_attention=switch, hybrid_prefill="off")
    hooks = hooks_for(config, "scheduler")
    ours = {hook.function.__name__ for hook in hooks if hook.function.__module__ == shared_prefixes.__name__}
    assert ours == expected


def test_auto_on_a_gpu_waits_for_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever proves it on a card changes one name, and has what is expected to gain."""
    assert [two_parts.asked_for(switch) for switch in ("auto", "on", "off")] == ["off", "on", "off"]
    monkeypatch.setattr(two_parts, "AUTO_IS_PROVED", True)
    assert [two_parts.asked_for(switch) for switch in ("auto", "on", "off")] == ["auto", "on", "off"]
    monkeypatch.setattr("sgl_prefill.startup.device.has_accelerator", lambda: True)
    assert "around_init_new" in {hook.function.__name__ for hook in hooks_for(PrefillConfig(), "scheduler")}


def test_what_was_read_together_is_counted_and_told() -> None:
    """Four requests over 128 positions: three of them need not read, in each of two steps; a step alone counts nothing."""
    step = sharers()
    backend = triton_backend(step)
    for changed in ({}, {}, {"extend_prefix_lens_cpu": [0, 0, 0, 0]}):
        backend.sharing.plan(step.batch(**changed), lambda table, parts: parts)
    runner: Any = SimpleNamespace(attn_backend=both_of(backend, SimpleNamespace()))
    assert shared_prefixes.counts_of(runner) == {"steps": 2, "requests": 8, "saved_tokens": 2 * 3 * 128}
    runner.attn_backend = SimpleNamespace()
    assert shared_prefixes.counts_of(runner) is None


@pytest.mark.parametrize(
    ("n_heads", "head_dim", "can"),
    [(32, 128, True), (64, 128, True), (65, 128, False), (96, 128, False), (32, 256, True), (33, 256, False)],
)
def test_heads_that_flashinfers_merge_has_no_threads_for_keep_the_stock_path(
    n_heads: int, head_dim: int, can: bool
) -> None:
    """A block of it has all heads of a token, and at most 1,024 threads; SGLang goes on with a merge of another base there."""
    backend = flashinfer_backend(sharers())
    backend.indices_updater_prefill = SimpleNamespace(
        num_qo_heads=n_heads, head_dim=head_dim, q_data_type=torch.bfloat16
    )
    assert (backend._problem is None) == can


def test_off_makes_each_request_a_group_of_its_own_on_a_cpu() -> None:
    """The hook finds the backend of either kind of pass, and others are left as they are."""
    from sgl_prefill.cpu.attention_backend import CpuFlashAttentionBackend

    table = torch.arange(1, 201, dtype=torch.int32).expand(2, -1)
    found = {}
    for shares in (True, False):
        backend: Any = CpuFlashAttentionBackend.__new__(CpuFlashAttentionBackend)
        backend.shares_prefixes = True
        backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
        backend._requests = [SimpleNamespace(pool_row=row, n_kv=102) for row in range(2)]
        backend._cached_tokens = [100, 100]
        if not shares:
            checked("off", both_of(backend, SimpleNamespace()))
        found[shares] = backend._native_requests([0, 2, 4])
    assert [found[shares].fields["groups"] for shares in (True, False)] == [1, 2]
