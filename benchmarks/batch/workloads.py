"""The jobs of BatchLLM's evaluation (sections 6.2 and 6.3), lengths divided, as rows of token ids."""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks import shapes
from sgl_prefill.core.batch.batch_plan import depth_first
from sgl_prefill.core.batch.token_rows import TokenRows

Rows = list[list[int]]


class Micro(NamedTuple):
    """Groups of one prefix each; the paper's name is prefix/own, sharing degree."""

    prefix_tokens: int
    own_tokens: int
    degree: int
    n_rows: int
    n_new_tokens: int = 0  # 0: prefill only

    @property
    def name(self) -> str:
        writes = f", {self.n_new_tokens} new tokens" if self.n_new_tokens else ""
        return f"{self.prefix_tokens}/{self.own_tokens} at {self.degree}{writes}"

    @property
    def ceiling(self) -> float:
        """The share of all tokens that need not be computed: each prefix once."""
        return (self.degree - 1) * self.prefix_tokens / (self.degree * (self.prefix_tokens + self.own_tokens))

    def rows(self) -> Rows:
        rng = random.Random(self.name)
        made = []
        for _ in range(self.n_rows // self.degree):
            prefix = shapes.token_ids(rng, self.prefix_tokens)
            made += [[*prefix, *shapes.token_ids(rng, self.own_tokens)] for _ in range(self.degree)]
        rng.shuffle(made)
        return made


# Divided by 10: the paper's 2000/200 and 16000/200 at all degrees (Figs. 5, 6 and 8), 2000/1000 and 1000/1000 (Fig. 5).
MICRO = (
    *(Micro(200, 20, degree, 320) for degree in (2, 4, 8, 16)),
    *(Micro(1600, 20, degree, 64) for degree in (2, 4, 8, 16)),
    Micro(200, 100, 16, 320),
    Micro(100, 100, 16, 320),
)
# The paper's 100 new tokens, divided by 10 and as they are.
WITH_DECODE = tuple(Micro(200, 20, 16, 160, n_new_tokens=n) for n in (10, 100))

INSTRUCTION_TOKENS = 20


def industry(n_rows: int, divided_by: int) -> Rows:
    """Snippets of web documents (section 6.2.2): one short instruction, documents of N(1570, 500) tokens with some three queries
    of 30 tokens each."""
    rng = random.Random("industry")
    instruction = shapes.token_ids(rng, INSTRUCTION_TOKENS // divided_by)
    made: Rows = []
    while len(made) < n_rows:
        n_document = max(round(rng.gauss(1570, 500) / divided_by), 8)
        document = shapes.token_ids(rng, n_document)
        for _ in range(min(rng.choice((1, 2, 3, 4, 5)), n_rows - len(made))):
            made.append([*instruction, *document, *shapes.token_ids(rng, max(30 // divided_by, 2))])
    rng.shuffle(made)
    return made


class Industry(NamedTuple):
    """`industry` as a workload of a job."""

    n_rows: int
    divided_by: int
    n_new_tokens: int = 0

    @property
    def name(self) -> str:
        return "industry"

    @property
    def ceiling(self) -> float:
        tokens = TokenRows.of(self.rows())
        return depth_first(tokens).saved_tokens / int(tokens.lengths.sum())

    def rows(self) -> Rows:
        return industry(self.n_rows, self.divided_by)
