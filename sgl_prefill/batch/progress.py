"""How far a job is: its line on stderr, and Prometheus metrics."""

from __future__ import annotations

from typing import TextIO

import prometheus_client

from sgl_prefill.errors import BatchJobError
from sgl_prefill.startup.progress_bar import ProgressBar


class Progress:
    """Counts what this run answers.

    Args:
        n_rows: of the job; n_before: of these, answered by earlier runs.
        n_tokens: of all prompts that this run answers; most_saved_tokens: of these, what the plan need not compute; unit: "bytes"
            where the plan has counted these, while answers tell of tokens.
    """

    def __init__(
        self,
        n_rows: int,
        n_before: int,
        n_tokens: int,
        most_saved_tokens: int,
        unit: str = "tokens",
        *,
        out: TextIO | None = None,
    ) -> None:
        self.n_rows, self.n_done, self.n_failed = n_rows, n_before, 0
        self.n_tokens, self.most_saved_tokens = n_tokens, most_saved_tokens
        self.n_tokens_done = self.n_tokens_saved = 0
        self._n_before, self._has_tokens = n_before, unit == "tokens"
        # Where the plan has counted bytes, the share that is done is one of rows.
        self.bar = ProgressBar(n_tokens if self._has_tokens else n_rows - n_before, out=out)

    @property
    def elapsed_s(self) -> float:
        return self.bar.elapsed_s

    def add(self, n_answered: int, n_failed: int, n_tokens: int, n_saved: int) -> None:
        """Counts rows. n_tokens, n_saved: of all prompts so far, and what the prefix cache held of them."""
        self.n_done += n_answered + n_failed
        self.n_failed += n_failed
        self.n_tokens_done, self.n_tokens_saved = n_tokens, n_saved
        self.bar.show(self._n_past, *self._parts())

    def line(self) -> str:
        return self.bar.line(self._n_past, *self._parts())

    @property
    def _n_past(self) -> int:
        return self.n_tokens_done if self._has_tokens else self.n_done - self._n_before

    def _parts(self) -> list[str]:
        parts = [f"{self.n_done:,} of {self.n_rows:,} rows"]
        parts += [f"{self.n_failed:,} failed"] if self.n_failed else []
        parts.append(f"{self.n_tokens_done / max(self.elapsed_s, 1e-9):,.0f} tokens/s")
        if self.n_tokens_done and self.n_tokens:
            saved, most = self.n_tokens_saved / self.n_tokens_done, self.most_saved_tokens / self.n_tokens
            parts.append(f"{saved:.1%} saved (most: {most:.1%})")
        return parts

    def end(self) -> None:
        """Says how the job ended."""
        self.bar.say(f"{self.line()}; this run took {self.elapsed_s:.1f} s")

    def serve_metrics(self, port: int) -> None:
        """Serves these numbers, and SGLang's own, to Prometheus. Raises BatchJobError where the port is taken."""
        try:
            prometheus_client.start_http_server(port, addr="127.0.0.1")
        except OSError as error:
            raise BatchJobError(f"--metrics-port {port}: {error.strerror}") from error
        for name, about, value in (
            ("rows", "Rows of the job.", lambda: self.n_rows),
            ("rows_done", "Rows that are answered, or have failed.", lambda: self.n_done),
            ("rows_failed", "Rows that have failed.", lambda: self.n_failed),
            ("tokens", "Tokens of all prompts of this run.", lambda: self.n_tokens),
            ("tokens_done", "Tokens of the prompts that are done.", lambda: self.n_tokens_done),
            ("tokens_saved", "Of these, tokens that the prefix cache held.", lambda: self.n_tokens_saved),
            ("tokens_saved_most", "Tokens that the plan saves at most.", lambda: self.most_saved_tokens),
        ):
            prometheus_client.Gauge(f"sgl_prefill_job_{name}", about).set_function(value)
