"""How far a job is: a line that is written over on a terminal, a line a minute elsewhere, and Prometheus metrics."""

from __future__ import annotations

import sys
import time
from typing import TextIO

import prometheus_client

from sgl_prefill.errors import BatchJobError

TERMINAL_EVERY_S = 0.5
FILE_EVERY_S = 60.0


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
        out: TextIO = sys.stderr,
    ) -> None:
        self.n_rows, self.n_done, self.n_failed = n_rows, n_before, 0
        self.n_tokens, self.most_saved_tokens = n_tokens, most_saved_tokens
        self.n_tokens_done = self.n_tokens_saved = 0
        self._n_before, self._has_tokens = n_before, unit == "tokens"
        self._out = out
        self._began_s = time.monotonic()
        self._shown_s = self._began_s
        self._every_s = TERMINAL_EVERY_S if out.isatty() else FILE_EVERY_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def add(self, n_answered: int, n_failed: int, n_tokens: int, n_saved: int) -> None:
        """Counts rows. n_tokens, n_saved: of all prompts so far, and what the prefix cache held of them."""
        self.n_done += n_answered + n_failed
        self.n_failed += n_failed
        self.n_tokens_done, self.n_tokens_saved = n_tokens, n_saved
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._write(self.line())

    def line(self) -> str:
        """How far the job is, in one line."""
        elapsed_s = max(self.elapsed_s, 1e-9)
        of_all = f" of {self.n_tokens:,}" if self._has_tokens else ""
        parts = [
            f"{self.n_done:,} of {self.n_rows:,} rows",
            f"{self.n_tokens_done:,}{of_all} tokens, {self.n_tokens_done / elapsed_s:,.0f} a second",
        ]
        if self.n_tokens_done and self.n_tokens:
            saved, most = self.n_tokens_saved / self.n_tokens_done, self.most_saved_tokens / self.n_tokens
            parts.append(f"{saved:.1%} saved (most: {most:.1%})")
        if (left_s := self.left_s) is not None:
            parts.append(f"{_duration(left_s)} left")
        if self.n_failed:
            parts.append(f"{self.n_failed:,} failed")
        return ", ".join(parts)

    @property
    def left_s(self) -> float | None:
        """Seconds until the end at the speed so far, in tokens, or in rows where the plan has counted bytes."""
        if self._has_tokens:
            past, past_before, whole = self.n_tokens_done, 0, self.n_tokens
        else:
            past, past_before, whole = self.n_done, self._n_before, self.n_rows
        return self.elapsed_s * (whole - past) / (past - past_before) if past > past_before and self.n_tokens else None

    def end(self) -> None:
        """Says how the job ended."""
        self._write(f"{self.line()}; this run took {_duration(self.elapsed_s)}", is_last=True)

    def _write(self, line: str, *, is_last: bool = False) -> None:
        if self._out.isatty():
            self._out.write(f"\r\x1b[K{line}" + ("\n" if is_last else ""))
        else:
            self._out.write(line + "\n")
        self._out.flush()

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


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
