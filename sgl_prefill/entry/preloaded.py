"""Imported in one process only, that of `prefork`: what every process of a server imports."""

from sgl_prefill.entry import prefork

prefork.end_with_parent()  # before the imports, which take 20 seconds: a launcher that refuses to start is not waited for

import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402
import torch._dynamo  # noqa: E402

import sgl_prefill.entry.activation  # noqa: E402

__all__ = ["sgl_prefill", "sglang", "torch"]

prefork.prepare_forking()
