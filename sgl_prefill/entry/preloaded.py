"""Imports of every process of a server, for the fork server of `prefork` only."""

from sgl_prefill.entry import prefork

prefork.end_with_parent()  # before the imports, which take 20 seconds: the launcher may refuse to start

import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402
import torch._dynamo  # noqa: E402

import sgl_prefill.entry.activation  # noqa: E402

__all__ = ["sgl_prefill", "sglang", "torch"]

prefork.prepare_forking()
