"""Would INT8 weights answer as rightly as bfloat16 on a CPU? The demo model, quantised, beside itself in float32.

Products are imitated: values are rounded to 8 bits and multiplied in float32.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import report
from benchmarks.rivals import workloads as rivals
from sgl_prefill.examples import demo_model

N_PROMPTS, QUICK_PROMPTS = 8, 2
EQUAL = 1.25  # times bfloat16's mean distance from float32


class Int8Linear(torch.nn.Module):
    """One scale for each output channel; with `rows`, one for each row of the input too, taken as it comes."""

    def __init__(self, linear: torch.nn.Linear, *, rows: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.rows = rounded(linear.weight.data), linear.bias, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x) if self.rows else x, self.weight, self.bias)


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def measure(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dues = rivals.guard(QUICK_PROMPTS if quick else N_PROMPTS)
    prompts, labels = [due.input_ids for due in dues], list(dues[0].label_ids)
    exact = logprobs(model_in(torch.float32), prompts, labels)
    rows = [row("bfloat16", exact, logprobs(model_in(torch.bfloat16), prompts, labels))]
    for name, of_rows in (("INT8 weights", False), ("INT8 weights and activations", True)):
        rows.append(row(name, exact, logprobs(quantised(rows=of_rows), prompts, labels)))
        print(rows[-1], file=sys.stderr)
    allowed = EQUAL * rows[0]["mean_difference"]
    targets = [
        report.Target.at_most(
            f"{found['what']}: mean distance of a label's log-probability", found["mean_difference"], allowed
        )
        for found in rows[1:]
    ]
    return report.part(rows, targets)


def model_in(dtype: torch.dtype) -> Any:
    made: Any = AutoModelForCausalLM.from_pretrained(demo_model.ensure(), dtype=dtype)
    return made.eval()


def quantised(*, rows: bool) -> Any:
    model = model_in(torch.float32)
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Int8Linear(child, rows=rows))
    return model


@torch.inference_mode()
def logprobs(model: Any, prompts: list[list[int]], labels: list[int]) -> torch.Tensor:
    rows = [
        model(torch.tensor([one]), logits_to_keep=1).logits[0, -1].float().log_softmax(-1)[labels] for one in prompts
    ]
    return torch.stack(rows)


def row(what: str, exact: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    difference = (found - exact).abs()
    return {
        "what": what,
        "mean_difference": round(float(difference.mean()), 4),
        "largest_difference": round(float(difference.max()), 4),
        "other_best_labels": int((found.argmax(-1) != exact.argmax(-1)).sum()),
        "prompts": len(exact),
    }
