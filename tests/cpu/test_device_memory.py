"""A start on a GPU, with a fake driver and a fake model: nothing here has run on a device."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.gpu_memory import margin_bytes
from sgl_prefill.core.memory_plan import MemoryPlan
from sgl_prefill.errors import AliasedMemoryError, MemoryPlanError, NoMemoryLeftError, SglPrefillError
from sgl_prefill.kv.cuda import AliasedCudaMemory
from sgl_prefill.port.kv.allocator import SuffixKVAllocator
from sgl_prefill.port.kv.pool import SuffixKVPool
from sgl_prefill.port.runner.runner_state import RunnerState
from sgl_prefill.port.runner.sglang_model import SglangModel
from sgl_prefill.startup import disk_cache, memory_profile
from sgl_prefill.startup.arguments import DEVICE_MEMORY_FRACTION
from sgl_prefill.startup.prepare import prepare
from sgl_prefill.startup.record import StartRecord
from tests.support.fake_cuda_driver import GRANULE_BYTES, FakeCard, FakeDevice, installed

MIB = 1 << 20
PAGE = 4
N_LAYERS = 3
ONE_LAYER = 2 * 64 * 2  # bytes of a token: K and V, 4 heads of 16, bfloat16
LATER_BYTES = 5 * MIB  # kernels and workspaces that come with the first input
CARD_BYTES, FREE_BYTES = 2048 * MIB, 640 * MIB  # the margin takes 532 MiB


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_at() -> Iterator[None]:
    """Each start that runs out of memory looks for garbage, among all that SGLang's import has made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def card() -> Iterator[FakeCard]:
    with installed(make_card()) as found:
        yield found
        assert found.is_empty, "something is still mapped"


def make_card(free_bytes: int = FREE_BYTES, **options: Any) -> FakeCard:
    return FakeCard(CARD_BYTES, held_bytes=CARD_BYTES - free_bytes, **options)


def make_memory(card: FakeCard, n_buffers: int = 3) -> AliasedCudaMemory:
    return AliasedCudaMemory(n_buffers, 8 * GRANULE_BYTES, 4 * GRANULE_BYTES, 0)


def test_on_cuda_tails_are_one_memory_and_own_parts_are_not(card: FakeCard) -> None:
    """Through the driver's calls; sizes are rounded up, and what has been committed stays as it is."""
    memory = make_memory(card)
    own = 8 * GRANULE_BYTES
    memory.commit_own(3 * GRANULE_BYTES - 1)
    memory.commit_shared(GRANULE_BYTES)
    memory.tensors[0][own : own + GRANULE_BYTES] = 7
    memory.commit_shared(2 * GRANULE_BYTES + 1)
    for tensor in memory.tensors:
        assert tensor[own : own + GRANULE_BYTES].eq(7).all()
        assert tensor[own + GRANULE_BYTES : own + 3 * GRANULE_BYTES].eq(0).all()
    memory.tensors[1][: 3 * GRANULE_BYTES] = 9
    assert memory.tensors[2][: 3 * GRANULE_BYTES].eq(0).all()
    assert memory.backed_bytes == (3 * 3 + 3) * GRANULE_BYTES == FREE_BYTES - card.free_bytes
    memory.close()
    memory.close()


def test_memory_that_the_driver_hands_out_is_zero_before_anyone_reads_it(card: FakeCard) -> None:
    """It may hold NaN of another process, and attention reads rows past the end of a page with weight 0: 0 x NaN is NaN."""
    memory = make_memory(card)
    memory.commit_own(8 * GRANULE_BYTES)
    memory.commit_shared(4 * GRANULE_BYTES)
    assert all(tensor.eq(0).all() for tensor in memory.tensors)
    memory.close()


def test_a_tail_has_no_memory_until_it_is_asked_for_and_gives_it_back(card: FakeCard) -> None:
    """Scratch for a context of a million tokens would take gigabytes before anybody knows whether they are free."""
    memory = make_memory(card)
    assert memory.backed_bytes == 3 * GRANULE_BYTES, "torch must find some memory at each address"
    memory.commit_shared(4 * GRANULE_BYTES)
    card.is_busy = True
    memory.release_shared()
    assert memory.backed_bytes == 3 * GRANULE_BYTES
    memory.commit_shared(GRANULE_BYTES)
    assert memory.tensors[1][8 * GRANULE_BYTES : 9 * GRANULE_BYTES].eq(0).all()
    memory.close()


@pytest.mark.parametrize("fail_at", range(1, 26))
def test_a_driver_that_is_out_of_memory_at_any_call_leaves_what_was_there_before(fail_at: int) -> None:
    """At each of the calls of a constructor and two commits: the message quotes the driver, and what has been mapped is whole."""
    with installed(FakeCard(64 * MIB, fail_at=fail_at)) as card:
        made: list[AliasedCudaMemory] = []

        def run() -> None:
            made.append(make_memory(card))
            made[0].commit_own(4 * GRANULE_BYTES)
            made[0].commit_shared(2 * GRANULE_BYTES)

        with pytest.raises(NoMemoryLeftError, match=r"failed with 2: .*--suffix-kv keep"):
            run()
        for memory in made:
            assert memory.backed_bytes == card.total_bytes - card.free_bytes
            memory.commit_own(4 * GRANULE_BYTES)
            memory.commit_shared(2 * GRANULE_BYTES)
            assert all(tensor[: 4 * GRANULE_BYTES].eq(0).all() for tensor in memory.tensors)
            memory.close()
        assert card.is_empty


def test_memory_is_given_back_once_nothing_runs_and_a_refused_call_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A driver that shuts down refused the first call, and all that followed was kept."""
    with installed(FakeCard(64 * MIB)) as card:
        memory = make_memory(card)
        memory.commit_shared(GRANULE_BYTES)
        card.is_busy = True
        card.refuses = {"cuMemRelease"}
        card.calls.clear()
        memory.close()
        assert card.calls[0] == "synchronize"
        assert [card.calls.count(name) for name in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree")] == [6, 4, 3]
        assert not card.mappings
        assert not card.reservations
        assert "4 calls were refused" in caplog.text


def test_an_error_that_is_not_for_lack_of_memory_is_named_as_it_is(card: FakeCard) -> None:
    """Shorter inputs would not help."""
    memory = make_memory(card)
    card.refuses = {"cuMemCreate"}
    with pytest.raises(AliasedMemoryError, match="cuMemCreate") as found:
        memory.commit_own(2 * GRANULE_BYTES)
    assert not isinstance(found.value, NoMemoryLeftError)
    memory.close()


@dataclasses.dataclass
class Body:
    """What a start asks of a hybrid body."""

    retained_bytes_per_token: int = 1024
    chunk_tokens: int = 64
    serves_short: bool = False


class Backend:
    """An attention backend that takes a batch's own K and V as arguments."""


class FlashAttentionBackend(Backend):
    """By the name of SGLang's, which reads them from the pool."""

    fa_skip_kv_cache = False


class FakeStep:
    """A forward pass that takes memory of the card as torch's allocator would, and writes its KV."""

    def __init__(self, model: FakeModel, n_tokens: int) -> None:
        self._model, self._n_tokens = model, n_tokens

    def run(self) -> torch.Tensor:
        model, pool = self._model, self._model.pool
        model.lengths.append(self._n_tokens)
        if not model.is_warm:
            model.card.held_bytes += LATER_BYTES
            model.is_warm = True
        needed = model.fixed_bytes + self._n_tokens * model.bytes_per_token
        needed += model.plain_bytes if self._n_tokens <= FakeDevice.plain_tokens else 0
        needed += model.jump_bytes if self._n_tokens > model.jumps_at_tokens else 0
        if not model.card.can_allocate(max(needed - model.card.cached_bytes, 0)):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {needed} bytes")
        model.card.cached_bytes = max(model.card.cached_bytes, needed)
        model.peak_bytes = max(model.peak_bytes, needed)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[pool.first_scratch_slot : pool.first_scratch_slot + self._n_tokens] = 1.0
        return torch.zeros(1, 8)

    def release(self) -> None:
        self._model.n_released += 1


class FakeModel(SglangModel):
    """SGLang's model runner as the start sees it, with a pool on the card and passes that only take memory."""

    fixed_bytes, bytes_per_token = 3 * MIB, 1024
    jumps_at_tokens, jump_bytes = 10**9, 700 * MIB  # what a kernel takes of long inputs alone
    plain_bytes = 0  # what SGLang's layers take of short ones beyond a hybrid pass

    def __init__(self, state: RunnerState, runner: Any, card: FakeCard) -> None:
        super().__init__(state, runner)
        self.card, self.pool = card, runner.token_to_kv_pool
        self.is_warm = False
        self.lengths: list[int] = []
        self.n_released = self.peak_bytes = 0

    @property
    def circumstances(self) -> dict[str, Any]:
        return {}

    def weights_bytes(self) -> int:
        return 100 * MIB

    def step(self, prompts: Any, cached_slots: torch.Tensor | None = None) -> Any:
        super().step(prompts, cached_slots)
        return FakeStep(self, sum(map(len, prompts)))


@contextmanager
def start(
    card: FakeCard,
    *,
    context_tokens: int = 20_000,
    fraction: float = DEVICE_MEMORY_FRACTION,
    backend: Any = None,
    is_hybrid: bool = True,
    **options: Any,
) -> Iterator[tuple[FakeModel, StartRecord]]:
    """A loaded model before `prepare`. SGLang would have found nine tenths of the card for KV."""
    from sglang.srt import runtime_context

    config = PrefillConfig(paper=True, skip_parity_gate=True, hybrid_chunk_tokens=64, **options)
    record = StartRecord(config)
    state = RunnerState(record)
    state.hybrid = Body() if is_hybrid else None  # type: ignore[assignment]
    record.memory_beyond_weights_bytes = int(fraction * card.free_bytes)
    scratch_tokens = config.max_input_length or context_tokens
    pool = SuffixKVPool(
        durable_tokens=card.free_bytes // (N_LAYERS * ONE_LAYER),
        scratch_tokens=scratch_tokens,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=4,
        head_dim=16,
        v_head_dim=16,
        layer_num=N_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    allocator = SuffixKVAllocator(
        first_scratch_slot=pool.first_scratch_slot,
        scratch_tokens=pool.scratch_tokens,
        size=0,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )
    heads = dict.fromkeys(("joint_head_config", "pointer_head"))
    model_config = SimpleNamespace(context_len=context_tokens, vocab_size=100, model_path="models/toy", **heads)
    runner = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=1, prefill_attention_backend="fa3", decode_attention_backend="fa3"),
        device="cpu",
        dtype=torch.bfloat16,
        page_size=PAGE,
        model_config=model_config,
        is_generation=True,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        max_total_num_tokens=0,
        attn_backend=backend or FlashAttentionBackend(),
        prefill_cuda_graph_runner=None,
    )
    model, held_bytes = FakeModel(state, runner, card), card.held_bytes

    def peak_bytes(run: Any) -> int:
        model.peak_bytes = 0
        run()
        return model.peak_bytes

    schedule = SimpleNamespace(mem_fraction_static=fraction)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(FakeDevice, "peak_bytes_of", staticmethod(peak_bytes))
        patches.setattr(disk_cache, "load_for_all", lambda *_, **__: None)
        patches.setattr(disk_cache, "store", lambda *_, **__: None)
        patches.setattr(runtime_context, "get_schedule", lambda: schedule)
        try:
            yield model, record
        finally:
            model.close()
            card.held_bytes, card.cached_bytes = held_bytes, 0


def planned(card: FakeCard, **options: Any) -> MemoryPlan:
    with start(card, **options) as (model, record):
        prepare(record, model)
        assert record.memory_plan is not None
        return record.memory_plan


def rounding_bytes() -> int:
    """Of 2 x 3 buffers and 2 tails to whole granules, and of the padding page."""
    return (2 * N_LAYERS + 2) * GRANULE_BYTES + PAGE * N_LAYERS * ONE_LAYER


def test_durable_kv_is_what_is_free_after_the_profile_less_activations_and_a_margin(card: FakeCard) -> None:
    """Whatever share of the card SGLang has found for KV: kernels and workspaces that came with the first input are counted."""
    with start(card, max_input_length=10_000) as (model, record):
        prepare(record, model)
        plan = record.memory_plan
        assert plan is not None
        room = FREE_BYTES - LATER_BYTES - margin_bytes(card.total_bytes) - rounding_bytes()
        for_input = model.fixed_bytes + 10_000 * (model.bytes_per_token + ONE_LAYER)
        assert plan.durable_tokens == (room - for_input) // (N_LAYERS * ONE_LAYER) // PAGE * PAGE
        assert card.free_bytes >= margin_bytes(card.total_bytes) + model.fixed_bytes + 10_000 * model.bytes_per_token
        model.step([[1] * 10_000]).run()
        assert model.runner.max_total_num_tokens == plan.durable_tokens
        last = model.pool.page_size + plan.durable_tokens
        assert all(buffer[:last].eq(0).all() for buffer in (*model.pool.k_buffer, *model.pool.v_buffer))


def test_the_plan_has_room_for_what_runs_in_sglangs_layers(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of up to 8,192 tokens, which take more than a longer one chunk by chunk."""
    before = planned(card, max_input_length=19_000)
    monkeypatch.setattr(FakeModel, "plain_bytes", 50 * MIB)
    assert before.durable_bytes - planned(card, max_input_length=19_000).durable_bytes == pytest.approx(
        50 * MIB, abs=MIB
    )


def test_a_smaller_fraction_is_a_limit_on_kv_as_in_sglang(card: FakeCard) -> None:
    """Two engines on one card: each is told its share."""
    plan = planned(card, fraction=0.1, max_input_length=10_000)
    kv_bytes = plan.durable_bytes + 10_000 * ONE_LAYER
    assert kv_bytes == pytest.approx(0.1 * FREE_BYTES, rel=1e-3)
    assert planned(card, fraction=0.95, max_input_length=10_000) == planned(card, max_input_length=10_000)
    with pytest.raises(MemoryPlanError, match=r"that --mem-fraction-static leaves for KV.*raise --mem-fraction-static"):
        planned(card, fraction=0.001, max_input_length=10_000)


def test_scratch_is_physical_for_what_runs_and_for_no_more(card: FakeCard) -> None:
    """The context has 500,000 tokens, whose scratch takes a fifth of what is free; the plan needs less."""
    with start(card, context_tokens=500_000) as (model, record):
        assert model.pool.backed_bytes == 2 * N_LAYERS * GRANULE_BYTES
        prepare(record, model)
        assert record.memory_plan is not None
        longest = record.memory_plan.max_input_tokens
        assert max(model.lengths) > longest, "the profile has run a longer one"
        assert model.pool.backed_scratch_tokens == -(-longest // PAGE) * PAGE
        assert model.scratch_tokens == model.pool.backed_scratch_tokens
        assert int(model.last_slots(10)[-1]) < model.pool.first_scratch_slot + longest + PAGE


def test_an_automatic_length_that_runs_out_of_memory_is_shortened(card: FakeCard) -> None:
    """70,000 tokens seem to fit, and beyond 40,000 something takes more than there is: the start ended with a traceback."""
    with start(card, context_tokens=10**6) as (model, record):
        model.jumps_at_tokens = 40_000
        prepare(record, model)
        plan = record.memory_plan
        assert plan is not None
        assert max(model.lengths) > 60_000
        assert 20_000 < plan.largest_input_tokens <= 40_000
        assert model.n_released == len(model.lengths), "a pass that failed gives its slots back too"
        model.step([[1] * plan.max_input_tokens]).run()


def test_a_named_length_that_runs_out_of_memory_ends_the_start_with_a_message(card: FakeCard) -> None:
    """It is what the user wants: a shorter one would be another engine."""
    with start(card, max_input_length=60_000) as (model, record):
        model.jumps_at_tokens = 40_000
        model.context_tokens = 10**6
        with pytest.raises(
            MemoryPlanError, match=r"an input of 60000 tokens runs out.*GiB are free.*--max-input-length"
        ):
            prepare(record, model)


def test_a_card_on_which_not_even_a_short_input_runs_is_refused_by_name(card: FakeCard) -> None:
    """Model, card, what is missing, what would do."""
    card.held_bytes = card.total_bytes - 538 * MIB
    with pytest.raises(MemoryPlanError, match=r"toy does not fit this Fake GPU .* missing; a card of 24 GB would do"):
        planned(card)
    with start(card) as (model, record):
        model.fixed_bytes = 700 * MIB
        with pytest.raises(
            MemoryPlanError, match=r"an input of 16 tokens runs out of memory beside the weights of toy"
        ):
            prepare(record, model)


def test_a_backend_that_gathers_k_and_v_is_charged_for_one_layer_of_them(card: FakeCard) -> None:
    """The profile's inputs lie in scratch, in one piece, where it needs no copy; a prompt with a prefix does not."""
    reads = planned(card, max_input_length=10_000)
    gathers = planned(card, max_input_length=10_000, backend=Backend())
    assert gathers.use.activation_bytes_per_token == reads.use.activation_bytes_per_token + ONE_LAYER
    plain = planned(card, max_input_length=10_000, backend=Backend(), is_hybrid=False)
    assert plain.use.activation_bytes_per_token == reads.use.activation_bytes_per_token


def test_no_start_that_runs_out_of_memory_leaves_anything_mapped() -> None:
    """At each allocation in turn, the driver's and torch's: it goes on with a shorter input, or ends with a message."""
    messages: list[str] = []
    n_starts = 0
    is_complete = False
    while not is_complete:
        n_starts += 1
        with installed(make_card(565 * MIB, fail_at=n_starts)) as card:
            try:
                planned(card, max_input_length=9_000)
            except SglPrefillError as error:
                messages.append(str(error))
            assert card.is_empty, f"after the failure of allocation {n_starts}"
            is_complete = card.n_allocations < n_starts
    assert n_starts > 60
    assert len(messages) > 50
    assert all("--max-input-length" in message for message in messages)


def test_what_torch_has_cached_is_given_back_before_kv_is_committed(card: FakeCard) -> None:
    """The driver cannot use it: a card with just enough memory failed."""
    with start(card, max_input_length=10_000) as (model, record):
        prepare(record, model)
        assert record.memory_plan is not None
        model.card.cached_bytes = card.free_bytes
        model.apply(record.memory_plan._replace(durable_tokens=record.memory_plan.durable_tokens))
        assert model.pool.backed_scratch_tokens == 10_000


def test_the_gate_poisons_a_page_more_and_leaves_no_nan_behind(card: FakeCard) -> None:
    """Rows past the end of a prompt's last page are what attention may read with weight 0."""
    with start(card, max_input_length=10_000) as (model, record):
        prepare(record, model)
        first = model.pool.first_scratch_slot
        model.poison_scratch(60)
        assert model.pool.k_buffer[1][first : first + 60 + PAGE].isnan().all()
        assert not model.pool.k_buffer[1][first + 60 + PAGE :][:PAGE].isnan().any()
        model.clean_scratch(60)
        assert not model.pool.v_buffer[2][first : first + 200].isnan().any()


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    """A kernel that cannot be loaded for lack of memory is as good as one; a wrong shape is none."""
    model: Any = SimpleNamespace(forget_slots=lambda: None, device=SimpleNamespace(release_unused=lambda: None))

    def fail() -> int:
        raise RuntimeError("Triton Error [CUDA]: out of memory\nat line 3")

    found = memory_profile._unless_memory_runs_out(model, fail)
    assert isinstance(found, memory_profile._RanOut)
    assert found.reason == "Triton Error [CUDA]: out of memory"

    def wrong() -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        memory_profile._unless_memory_runs_out(model, wrong)
