"""What several tests of the native kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sgl_prefill.cpu.native import library
from sgl_prefill.cpu.native.calls import Kernels
from tests.support import quiet_imports  # noqa: F401  (before all else that imports SGLang)

# Their tests run without native kernels too: they ask `library.native`, which reads the variable.
READ_THE_SWITCH = {"test_disk_cache.py"}


@pytest.fixture
def kernels() -> Kernels:
    """The best build; skips where there is no library."""
    found = library.find("auto")
    if found.kernels is None:
        pytest.skip(str(found.reason))
    return found.kernels


def skip_where_not_packed(dtype: torch.dtype) -> None:
    """PyTorch 2.14 packs no bfloat16 weights on processors without AVX-512: they are served unpacked."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch packs no bfloat16 weights on this processor")


@pytest.fixture
def kernel_switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PREFILL_CPU_KERNEL in this process, as if it had just started."""
    monkeypatch.setenv(library.VARIABLE, request.param)
    library.native.cache_clear()
    yield
    library.native.cache_clear()


@pytest.fixture(scope="module")
def published() -> Iterator[None]:
    """SGLang's process-wide settings, as if a server of a made-up model ran in this process."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.name in READ_THE_SWITCH:
        metafunc.fixturenames.append("kernel_switch")
        metafunc.parametrize("kernel_switch", ["auto", "off"], indirect=True)
