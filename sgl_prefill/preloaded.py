"""Imported in one process only, that of `prefork`: what every process of a server imports."""

import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry
import torch._dynamo

import sgl_prefill.seam.activation
from sgl_prefill import prefork

__all__ = ["sgl_prefill", "sglang", "torch"]

prefork.prepare_forking()
