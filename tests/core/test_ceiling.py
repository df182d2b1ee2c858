"""The ceiling of the hit share: what a far larger prefix cache would have held, of a memory that is bounded."""

from __future__ import annotations

from array import array

from sgl_prefill.scheduling.ceiling import BLOCK_TOKENS, Ceiling


def prompt(number: int, n_blocks: int) -> array[int]:
    """A prompt of so many whole blocks and a token, which shares none with those of other numbers."""
    return array("q", [number * 1_000_000 + place for place in range(n_blocks * BLOCK_TOKENS + 1)])


def add(ceiling: Ceiling, tokens: array[int], namespace: str | None = None, n_cached_tokens: int = 0) -> int:
    return ceiling.add(tokens, namespace, n_cached_tokens, len(tokens) - 1)


def test_it_is_what_was_seen_before_in_whole_blocks() -> None:
    """Two prompts of three blocks that share two: the second could have found two, whatever the engine's cache held."""
    ceiling, first = Ceiling(), prompt(1, 3)
    second = first[: 2 * BLOCK_TOKENS] + array("q", [9] * (BLOCK_TOKENS + 1))
    assert add(ceiling, first) == 0
    assert add(ceiling, second, n_cached_tokens=10) == 2 * BLOCK_TOKENS
    assert ceiling.share == 2 * BLOCK_TOKENS / (2 * len(first))
    assert ceiling.hit_share == 10 / (2 * len(first))


def test_another_tenant_finds_nothing() -> None:
    ceiling = Ceiling()
    add(ceiling, prompt(1, 3), "one")
    assert add(ceiling, prompt(1, 3), "other") == 0


def test_it_is_never_below_what_the_engine_has_found() -> None:
    """Beginnings of less than a block are found by the engine alone."""
    assert add(Ceiling(), prompt(1, 1), n_cached_tokens=40) == 40


def test_what_no_cache_may_answer_is_not_reusable() -> None:
    """Log-probabilities of a prompt are computed anew each time, and would have kept the share below its ceiling for ever."""
    ceiling, tokens = Ceiling(), prompt(1, 3)
    add(ceiling, tokens)
    assert ceiling.add(tokens, None, 0, most_cached_tokens=BLOCK_TOKENS) == BLOCK_TOKENS


def test_memory_is_bounded_and_what_is_asked_for_again_is_not_forgotten() -> None:
    """Once a limit was reached all had been forgotten, and every prompt counted as new again."""
    ceiling, often = Ceiling(generation_blocks=100), prompt(0, 10)
    add(ceiling, often)
    for number in range(1, 100):
        add(ceiling, prompt(number, 10))
        if number % 5 == 0:
            assert add(ceiling, often) == 10 * BLOCK_TOKENS
        assert len(ceiling._newer) + len(ceiling._older) <= 200
    assert add(ceiling, prompt(1, 10)) == 0
