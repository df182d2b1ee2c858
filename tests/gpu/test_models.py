"""What a start makes of the card and of the model: memory without a flag, and other kernels than plain bfloat16's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
import torch

from sgl_prefill.errors import ServerStartError
from tests.gpu.conftest import BACKENDS, MEMORY, Server, difference, free_gib, prompt
from tests.support import tiny_models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

POOL = ["--max-total-tokens", "20000", *MEMORY]
# Of four bits in the place of eight, where two engines round alike.
AWQ = {
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
}
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}


@pytest.mark.parametrize("gib", [None, 3], ids=["whole", "tight"])
def test_a_server_without_flags_takes_the_card_and_serves_what_it_promises(
    start: Callable[..., Server], write_model: Callable[..., Path], gib: int | None
) -> None:
    """Nearly all that is free, and the longest input that it says it serves is answered: profile and plan are right, on a card of
    which others hold all but 3 GiB too."""
    folder = write_model("llama", max_position_embeddings=200_000)
    left_gib = gib or free_gib()
    held = torch.empty(int((free_gib() - left_gib) * 2**30), dtype=torch.uint8, device="cuda")
    try:
        with ExitStack() as stack:
            server = start("sgl_prefill.launch_server", folder, stack=stack)
            assert free_gib() < 0.25 * left_gib or gib is not None
            n_longest = server.record()["memory"]["max_input_tokens"]
            assert n_longest >= (199_000 if gib is None else 1_000)
            (scored,) = server.score(prompt(11, n_longest))
            assert all(value == value for value in scored.logprobs)
            assert requests.get(f"{server.url}/health", timeout=60).status_code == 200
    finally:
        del held
        torch.cuda.empty_cache()


@pytest.mark.skipif(len(BACKENDS) < 2 or "triton" not in BACKENDS, reason="needs triton and another backend")
def test_triton_finds_rows_beyond_32_bits(start: Callable[..., Server], write_model: Callable[..., Path]) -> None:
    """Queries of 600,000 tokens of 32 heads of 128 are 2.4e9 numbers; another backend says the same of them."""
    shape = {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 128, "num_hidden_layers": 1}
    folder = write_model("llama", max_position_embeddings=700_000, **shape)
    found = []
    for backend in ("triton", BACKENDS[0]):
        with ExitStack() as stack:
            server = start("sgl_prefill.launch_server", folder, "--attention-backend", backend, stack=stack)
            found.append(server.score(prompt(12, 600_000)))
    assert difference(*found) <= 0.3


def answers_of_both(
    start: Callable[..., Server], folder: Path, ours: list[str], both: list[str]
) -> tuple[float, list[float]]:
    """(the largest difference between ours and stock's, what ours said first): long, its beginning with another end, short."""
    long = prompt(0, 6_000)
    asked = [long, [*long[:1_500], *prompt(1, 300)], prompt(2, 40)]
    found = []
    for module, flags in (("sgl_prefill.launch_server", ours), ("sglang.launch_server", [])):
        with ExitStack() as stack:
            server = start(module, folder, *POOL, *both, *flags, stack=stack)
            found.append([server.score(one)[0] for one in asked])
    return difference(*found), found[0][0].logprobs


def test_fp8_kv_is_served_on_the_plain_path_and_right(start: Callable[..., Server], model: Path, backend: str) -> None:
    """`--suffix-kv keep` with a quantized KV cache, hybrid prefilling left to the engine: flashinfer's ragged kernel and Triton's
    would get 8-bit rows beside bfloat16 queries."""
    both = ["--attention-backend", backend, "--kv-cache-dtype", "fp8_e4m3"]
    largest, _ = answers_of_both(start, model, ["--suffix-kv", "keep"], both)
    assert largest <= 0.5


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_a_healthy_mixture_of_experts_passes_the_gate(
    start: Callable[..., Server], write_model: Callable[..., Path], family: str
) -> None:
    """In bfloat16 a router may choose another expert where a sum is rounded the other way; three seeds outvote one."""
    folder = write_model(family, moe_intermediate_size=128, shared_expert_intermediate_size=256)
    with ExitStack() as stack:
        server = start("sgl_prefill.launch_server", folder, *POOL, stack=stack)
        assert server.record()["parity_gate"]
        (scored,) = server.score(prompt(3, 5_000))
    assert all(value == value for value in scored.logprobs)


@pytest.mark.parametrize(("name", "quantization"), [("awq", AWQ), ("fp8", FP8)])
def test_quantized_weights_start_with_hybrid_prefilling_on(
    start: Callable[..., Server], write_model: Callable[..., Path], name: str, quantization: dict[str, object]
) -> None:
    """Their kernels read options that a traced body must have. The weights are SGLang's dummies: it is asked whether it runs."""
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("block-wise FP8 needs compute capability 8.9")
    folder = write_model("llama", **quantization)
    with ExitStack() as stack:
        flags = ["--load-format", "dummy", "--hybrid-prefill", "on", *POOL]
        server = start("sgl_prefill.launch_server", folder, *flags, stack=stack)
        (scored,) = server.score(prompt(4, 5_000))
    assert all(value == value for value in scored.logprobs)


# Families whose pool, cache or attention only a GPU has; and those whose faults are mended.
FAMILIES = (
    *("deepseek-v3", "glm4-moe-lite", "glm-moe-dsa", "gpt-oss", "gemma3", "gemma4", "laguna", "cohere2"),
    *("qwen3-next", "qwen3.5", "lfm2", "mistral-window", "starcoder2-window", "phi3-long", "qwen3-moe"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_starts_without_flags_where_stock_does_and_answers_alike(
    start: Callable[..., Server], write_model: Callable[..., Path], family: str
) -> None:
    """In bfloat16: the median difference of a log-probability from transformers in float32 is at most stock's and 0.02 more, or,
    where SGLang ignores a part of the configuration, smaller."""
    folder = write_model(family)
    texts = [prompt(0, 900), [*prompt(0, 900)[:600], *prompt(1, 30)], prompt(2, 40)]
    expected = [[row[token] for token in range(30, 60)] for row in tiny_models.next_logprobs(folder, texts)]
    medians = {}
    for module in ("sglang.launch_server", "sgl_prefill.launch_server"):
        with ExitStack() as stack:
            try:
                server = start(module, folder, *POOL, stack=stack)
            except ServerStartError as error:
                if module.startswith("sglang"):
                    pytest.skip(f"stock does not start: {str(error)[-300:]}")
                raise
            found = [server.score(text)[0].logprobs for text in texts]
        pairs = zip(expected, found, strict=True)
        medians[module] = statistics.median(abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=True))
    stock, ours = medians.values()
    assert ours <= stock + 0.02, medians
