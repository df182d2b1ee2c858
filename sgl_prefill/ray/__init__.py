"""Label scoring over Ray Data: several engines answer one dataset, and prefixes that rows share are still computed once.

import ray
from sgl_prefill.ray import score

scored = score(ray.data.read_parquet("reviews.parquet"), prompt="{text}\nGood? Answer:", labels=[" yes", " no"], concurrency=2)
scored.write_parquet("scores")

Importing this package imports neither ray nor torch; `score` needs the extra `[ray]`.
"""

from __future__ import annotations

from sgl_prefill.ray.scorer import score

__all__ = ["score"]
