"""Whole jobs, known ahead (BatchLLM): `python -m sgl_prefill.batch`, and the same from Python.

from sgl_prefill import batch

with batch.Engine(model_path="...") as engine:
    for row in batch.score(prompts, labels=[" yes", " no"], engine=engine):
        print(row.number, row.probabilities)
"""

from __future__ import annotations

from sgl_prefill.batch.api import Engine, RowGroup, RowScore, plan, score

__all__ = ["Engine", "RowGroup", "RowScore", "plan", "score"]
