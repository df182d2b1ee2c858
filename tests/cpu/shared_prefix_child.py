"""Two parts by SGLang's own Triton kernels in Triton's interpreter, or through our subclass of its FlashAttention backend.

Run in a process of its own by `test_shared_prefix_attention`: a variable chooses the interpreter before the first import, and
modules that need a device are imported over stand-ins for their kernels.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_context

from sgl_prefill.port.runner.forward import BatchIO, attends_for_rows, gathers_kv, last_rows
from sgl_prefill.port.runner.shared_prefix_attention import SharedPrefixTriton, Sharing
from tests.support import (
    quiet_imports,  # noqa: F401  (before all else that imports SGLang)
    sharing_steps,
    slow_attention,
)

CLOSE = 1e-4


def check(backend: Any, step: sharing_steps.SharingStep, soft_cap: float = 0.0) -> bool:
    """Compares a step with and without K, V in the pool already; False where nobody shares anything in it."""
    dim = step.keys.shape[2]
    layer = RadixAttention(sharing_steps.HEADS, dim, 0.3, sharing_steps.KV_HEADS, 0, logit_cap=soft_cap)
    key, value = (x[step.new_slots] for x in (step.keys, step.values))
    for is_written in (False, True):
        batch = step.batch()
        backend.token_to_kv_pool = step.pool()
        backend.init_forward_metadata(batch)
        if backend._planned is None:
            return False
        if is_written:
            backend.token_to_kv_pool.set_kv_buffer(None, SimpleNamespace(loc=step.new_slots), key, value)
            batch._attn_output = torch.empty_like(step.query)
        given = (None, None) if is_written and not gathers_kv(backend) else (key, value)
        found = backend.forward(step.query, *given, layer, batch, save_kv_cache=not is_written)
        if is_written:
            assert found.data_ptr() == batch._attn_output.data_ptr(), "the output has its place"
        torch.testing.assert_close(found.view_as(step.query), step.expected(soft_cap), rtol=CLOSE, atol=CLOSE)
    return True


def check_read_rows(backend: Any, step: sharing_steps.SharingStep, rng: random.Random) -> None:
    """Compares the last layer of a hybrid pass, which asks SGLang's own attention for the last rows of each request."""
    from sglang.srt.layers.attention import flashattention_backend

    def attend(*, cu_seqlens_k_new: Any, window_size: Any, ver: int, **options: Any) -> torch.Tensor:
        return slow_attention.flash_attn_with_kvcache(**{**options, "return_softmax_lse": True})[0]

    n_kv = [n_cached + n_new for n_cached, n_new in zip(step.cached, step.new, strict=True)]
    whole = flashattention_backend.FlashAttentionMetadata(
        cache_seqlens_int32=torch.tensor(n_kv, dtype=torch.int32),
        max_seq_len_q=max(step.new),
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(step.new)], dtype=torch.int32),
        page_table=step.table[step.rows, :: step.page_tokens] // step.page_tokens,
    )
    nothing = ("use_mla", "kv_cache_is_mxfp8", "has_local_attention", "use_sliding_window_kv_pool", "fa_skip_kv_cache")
    vars(backend).update(dict.fromkeys(nothing, False), forward_metadata=whole)
    vars(flashattention_backend)["flash_attn_with_kvcache"] = attend
    vars(backend).update(attn_cp_size=1, kv_cache_dtype_str="auto", fa_impl_ver=3, full_cg_prefill_metadata=None)
    backend.local_attn_builder = None
    assert attends_for_rows(backend)
    backend.token_to_kv_pool = step.pool()
    backend.token_to_kv_pool.set_kv_buffer(
        None, SimpleNamespace(loc=step.new_slots), *(x[step.new_slots] for x in (step.keys, step.values))
    )
    batch = step.batch(input_ids=step.new_slots, attn_cp_metadata=None, batch_size=len(step.rows))
    backend.init_forward_metadata(batch)  # where requests share, in two parts
    n_read = [rng.randint(1, n_new) for n_new in step.new]
    io: Any = BatchIO.__new__(BatchIO)
    vars(io).update(_batch=batch, _layers={0: step.layer}, _n_read=n_read, _backend=backend, _kernels=None)
    rows = last_rows(batch, n_read)
    found = torch.empty_like(step.query[rows])
    io.attend(0, step.query[rows], found, only_read_rows=True)
    torch.testing.assert_close(found, step.expected()[rows], rtol=CLOSE, atol=CLOSE)
    assert backend.forward_metadata is whole, "the next pass finds what SGLang has made"


def triton() -> int:
    """Returns how many steps were compared."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.kernels.ops.attention.merge_state import merge_state_triton
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    warnings.simplefilter("ignore", RuntimeWarning)  # of a row without positions, which the kernel divides by 0
    TritonAttnBackend.init_forward_metadata = lambda *_: None
    n_compared = 0
    for seed in range(24):
        # SGLang's kernel divides pools into pages by a view; slots mean the same.
        step = sharing_steps.make(seed, page_tokens=(1, 64)[seed % 2], dim=(16, 32)[seed // 2 % 2], most_requests=6)
        backend: Any = SharedPrefixTriton.__new__(SharedPrefixTriton)
        backend.sharing, backend._merge = Sharing(step.runner(), "on"), merge_state_triton
        backend.extend_attention_fwd, backend.page_size = extend_attention_fwd, step.page_tokens
        n_compared += check(backend, step, soft_cap=(0.0, 5.0)[seed // 4 % 2])
    return n_compared


def fa3() -> int:
    """Returns how many steps were compared."""
    kernels: Any = ModuleType("sgl_kernel")
    kernels.__getattr__ = lambda name: SimpleNamespace()
    kernels.__path__ = []
    flash: Any = ModuleType("sgl_kernel.flash_attn")
    flash.__getattr__ = lambda name: SimpleNamespace()
    sys.modules |= {"sgl_kernel": kernels, "sgl_kernel.flash_attn": flash}
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    from sgl_prefill.port.runner import shared_prefix_fa3

    FlashAttentionBackend.init_forward_metadata = lambda *_: None
    vars(shared_prefix_fa3)["merge_state"] = slow_attention.merge_state
    n_compared = 0
    for seed in range(200):
        page_tokens = (1, 16, 64, 128)[seed % 4]
        step = sharing_steps.make(
            seed, page_tokens=page_tokens, most_tokens=max(200, 4 * page_tokens), n_nodes=4 * (seed % 8 == 0)
        )
        backend: Any = shared_prefix_fa3.SharedPrefixFlashAttention.__new__(
            shared_prefix_fa3.SharedPrefixFlashAttention
        )
        backend.sharing, backend.page_size = Sharing(step.runner(), "on"), page_tokens
        backend.fa_skip_kv_cache, backend.num_splits = False, 0
        backend.flash_attn_with_kvcache = slow_attention.flash_attn_with_kvcache
        n_compared += check(backend, step, soft_cap=(0.0, 5.0)[seed // 4 % 2])
        check_read_rows(backend, step, random.Random(seed))
        backend.fa_skip_kv_cache = True
        backend.init_forward_metadata(step.batch())
        assert backend._planned is None, "K and V are not in the pool"
    return n_compared


if __name__ == "__main__":
    with get_context().override_server_args():
        n_compared = {"triton": triton, "fa3": fa3}[sys.argv[1]]()
    assert n_compared >= 10, f"{n_compared} steps were in two parts: too few to tell anything"
    print(n_compared)
