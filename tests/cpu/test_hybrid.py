"""Tracing, cutting and running a body, on toy models whose attention is a running mean."""

from __future__ import annotations

import operator
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from sgl_prefill.errors import UntraceableModelError
from sgl_prefill.hybrid.body import HybridBody
from sgl_prefill.hybrid.shared_rows import SharedRows
from sgl_prefill.hybrid.split import Argument, BufferSpec, Piece, SplitBody, split_body
from sgl_prefill.hybrid.trace import TracedBody, trace_body
from sgl_prefill.port.runner.forward import sequence_mixing, sglang_traces

HIDDEN, VOCABULARY = 24, 40


class Layer(torch.nn.Module):
    """Query from x, K and V of another width, a residual stream around both halves."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.query = torch.nn.Linear(HIDDEN, HIDDEN)
        self.key_value = torch.nn.Linear(HIDDEN, 2 * 8)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, 64)
        self.down = torch.nn.Linear(64, HIDDEN)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        turned = torch.cos(positions.float() * 0.1).unsqueeze(-1)
        query = self.query(x) * turned
        key, value = self.key_value(x).split([8, 8], dim=-1)
        output = torch.empty_like(query)
        torch.ops.sgl_prefill_hybrid.attention(
            query, (key * turned).view(-1, 2, 4), value.view(-1, 2, 4), output, True, self.layer_id
        )
        x = x + self.out(output)
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Body(torch.nn.Module):
    def __init__(self, n_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(i) for i in range(n_layers))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return x


def make_batch(input_ids: torch.Tensor) -> Any:
    return SimpleNamespace(
        out_cache_loc=torch.arange(len(input_ids)), seq_lens=torch.tensor([len(input_ids)]), input_ids=input_ids
    )


def trace(body: torch.nn.Module) -> TracedBody:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trace_body(body, make_batch, "cpu", sglang_traces, sequence_mixing() | {"cumsum"})


class RunningMean:
    """`LayerIO`: K and V are kept by token, and attention is query + the mean of K and of V up to its position."""

    def __init__(self, n_tokens: int) -> None:
        self.pool = torch.full((2, n_tokens, 2, 4), torch.nan)
        self.attended: list[int] = []

    def write_kv(self, layer_id: int, start: int, end: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert layer_id == len(self.attended), "a layer writes after the one before it has attended"
        self.pool[0, start:end], self.pool[1, start:end] = key, value

    def attend(self, layer_id: int, query: torch.Tensor, output: torch.Tensor, *, only_read_rows: bool = False) -> None:
        self.attended.append(layer_id)
        mean = self.pool.cumsum(1) / torch.arange(1, self.pool.shape[1] + 1)[None, :, None, None]
        rows = mean.permute(1, 0, 2, 3).reshape(mean.shape[1], -1).repeat(1, 2)[:, :HIDDEN]
        output.copy_(query + (rows[-1:] if only_read_rows else rows))
        self.pool.fill_(torch.nan)


class Thread:
    """`Exchange` between threads: each puts its tensor down, waits for the others, and takes all."""

    def __init__(self, index: int, table: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.index, self.count = index, len(table)
        self._table, self._barrier = table, barrier

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self._table[self.index] = part
        self._barrier.wait(timeout=60)
        together = torch.cat(self._table)
        self._barrier.wait(timeout=60)
        return together

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.gather(tensor[None]).sum(0)


def run(
    split: SplitBody, chunk_tokens: int, input_ids: torch.Tensor, read_rows: torch.Tensor | None = None
) -> torch.Tensor:
    return run_body(HybridBody(split, chunk_tokens), input_ids, read_rows)


def run_body(body: HybridBody, input_ids: torch.Tensor, read_rows: torch.Tensor | None = None) -> torch.Tensor:
    positions = torch.arange(len(input_ids))
    token_rows = {"input_ids": input_ids, "positions": positions, "out_cache_loc": positions}
    with torch.no_grad():
        return body.run(token_rows, RunningMean(len(input_ids)), read_rows)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("n_tokens", [1, 8, HIDDEN, VOCABULARY, 64, 131])
def test_any_chunk_size_gives_what_one_chunk_gives(in_place: bool, n_tokens: int) -> None:
    """Also where the number of tokens is that of a weight's rows, which a comparison of sizes would confuse."""
    split = split_body(trace(Body()), attention_in_place=in_place)
    input_ids = torch.randint(0, VOCABULARY, (n_tokens,), generator=torch.Generator().manual_seed(n_tokens))
    whole = run(split, n_tokens, input_ids)
    assert whole.isfinite().all()
    for chunk_tokens in (1, 7, 24, 64, n_tokens + 1):
        torch.testing.assert_close(run(split, chunk_tokens, input_ids), whole, rtol=0, atol=1e-5)


def test_chunks_are_of_equal_length() -> None:
    """2,550 tokens in chunks of 1,024 are 896 + 896 + 758, and not 1,024 + 1,024 + 502, whose products waste a device."""
    body = HybridBody(split_body(trace(Body()), attention_in_place=True), 1024)
    written: list[int] = []
    body.on_written = lambda buffer, rows: written.append(len(rows)) if buffer == 0 else None
    run_body(body, torch.zeros(2550, dtype=torch.int64))
    assert written[:3] == [896, 896, 758]


@pytest.mark.parametrize("chunk_tokens", [7, 200])
def test_the_last_layer_of_scored_rows_alone_gives_those_rows(chunk_tokens: int) -> None:
    split = split_body(trace(Body()), attention_in_place=True)
    input_ids = torch.randint(0, VOCABULARY, (131,), generator=torch.Generator().manual_seed(1))
    last = run(split, chunk_tokens, input_ids, torch.tensor([130]))
    torch.testing.assert_close(last[130], run(split, chunk_tokens, input_ids)[130], rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 24, 130])
def test_ranks_that_hold_the_residual_stream_together_compute_what_one_does(n_ranks: int, chunk_tokens: int) -> None:
    """Whole, and of scored rows alone; each holds a part of every chunk, and what attention reads whole."""
    splits = [split_body(trace(Body()), attention_in_place=True) for _ in range(n_ranks)]
    input_ids = torch.randint(0, VOCABULARY, (131,), generator=torch.Generator().manual_seed(1))
    table, barrier = [torch.empty(0)] * n_ranks, threading.Barrier(n_ranks)
    attended = {buffer for one in splits[0].attentions for buffer in (one.query, one.output)}

    def rank(index: int, read_rows: torch.Tensor | None) -> torch.Tensor:
        body = HybridBody(splits[index], chunk_tokens)
        alone_bytes = body.retained_bytes_per_token
        body.shared, body.exchange = frozenset(range(len(splits[0].buffers))) - attended, Thread(index, table, barrier)
        assert body.shared
        assert body.retained_bytes_per_token < alone_bytes
        return run_body(body, input_ids, read_rows)

    for read_rows in (None, torch.tensor([130])):
        expected = run(splits[0], 200, input_ids)
        rows = torch.arange(131) if read_rows is None else read_rows
        with ThreadPoolExecutor(n_ranks) as threads:
            for found in threads.map(rank, range(n_ranks), [read_rows] * n_ranks):
                torch.testing.assert_close(found[rows], expected[rows], rtol=0, atol=1e-5)


def test_rows_of_any_chunk_are_found_where_they_are_kept() -> None:
    spec, n_tokens = BufferSpec((3,), torch.float32), 23
    value = torch.arange(n_tokens * 3, dtype=torch.float32).view(n_tokens, 3)
    wanted = torch.tensor([0, 6, 7, 13, 22, 3])
    table, barrier = [torch.empty(0)] * 2, threading.Barrier(2)

    def rank(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = SharedRows(spec, n_tokens, 7, Thread(index, table, barrier), torch.empty, torch.device("cpu"))
        for start in range(0, n_tokens, 7):
            held.write(start, value[start : start + 7])
        return held.select(wanted), held.whole()

    with ThreadPoolExecutor(2) as threads:
        for selected, whole in threads.map(rank, range(2)):
            assert torch.equal(selected, value[wanted])
            assert torch.equal(whole, value)


def test_buffers_are_reused_between_layers_and_k_and_v_have_none() -> None:
    """Two full-length buffers whatever the number of layers where attention writes over the query, three elsewhere."""
    for n_layers in (2, 6):
        traced = trace(Body(n_layers))
        two = split_body(traced, attention_in_place=True)
        assert two.buffers == [BufferSpec((HIDDEN,), torch.float32)] * 2
        assert len(two.attentions) == n_layers
        assert len(split_body(traced, attention_in_place=False).buffers) == 3
        assert [piece.outputs[-2:] for piece in two.pieces[:-1]] == [(None, None)] * n_layers


def test_a_piece_that_hands_its_inputs_on_exchanged_does_not_overwrite_them() -> None:
    """Outputs that are views of rows which another output overwrites are copied first."""
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    graph.output((second, first))
    fill, last = fx.Graph(), fx.Graph()
    ids = fill.placeholder("ids")
    rows = fill.call_method("unsqueeze", (fill.call_method("float", (ids,)), -1))
    fill.output((rows, fill.call_function(operator.mul, (rows, 10.0))))
    last.output((last.placeholder("kept"),))
    modules = [fx.GraphModule(torch.nn.Module(), g) for g in (fill, graph, last)]
    a, b = Argument(buffer=0), Argument(buffer=1)
    pieces = [
        Piece(modules[0], (Argument(token_rows="input_ids"),), (0, 1)),
        Piece(modules[1], (a, b), (0, 1)),
        Piece(modules[2], (a,), (0,)),
    ]
    body = HybridBody(SplitBody(pieces, [], [BufferSpec((1,), torch.float32)] * 2, 0), 3)
    assert body.run({"input_ids": torch.arange(8)}, RunningMean(8)).flatten().tolist() == [10.0 * i for i in range(8)]


class ReadsTheBatch(Body):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        scale: torch.Tensor = forward_batch.seq_lens
        return super().forward(input_ids, positions, forward_batch) * scale


class MeanOverTokens(Body):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        x = self.embedding(input_ids)
        mean = x.mean(0)
        result: torch.Tensor = self.layers[0](x, positions) + mean
        return result


class ReturnsTwo(Body):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        x = super().forward(input_ids, positions, forward_batch)
        return x, x + 1


class DependsOnData(Body):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        if input_ids.sum().item() > 5:
            positions = positions + 1
        return super().forward(input_ids, positions, forward_batch)


class SumsOverTokens(Body):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return super().forward(input_ids, positions, forward_batch).cumsum(0)


class NoAttention(Body):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        result: torch.Tensor = self.embedding(input_ids)
        return result


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (ReadsTheBatch, "reads seq_lens of the batch"),
        (MeanOverTokens, "has no row for each token"),
        (ReturnsTwo, "returns 2 tensors"),
        (DependsOnData, "Dynamo cannot record it"),
        (NoAttention, "holds no attention"),
        (SumsOverTokens, "mixes tokens outside softmax attention .cumsum"),
    ],
)
def test_a_body_that_is_not_token_wise_between_attentions_is_refused_with_the_reason(
    body: type[Body], reason: str
) -> None:
    """Each of these would be computed wrongly chunk by chunk, or not at all."""
    with pytest.raises(UntraceableModelError, match=reason):
        split_body(trace(body()), attention_in_place=True)
