"""Which jobs share a step."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_prefill.core.jct import FittedJct, Predictor
from sgl_prefill.core.job import BACKGROUND, Job
from sgl_prefill.core.packing import LOOK_AT, Steps, StepSize, fill_steps, pack
from sgl_prefill.core.policies.fifo import Fifo
from sgl_prefill.core.policies.srjf import CalibratedSrjf
from sgl_prefill.core.policy import PolicySettings
from tests.core.jobs import calibrate, job, srjf


def packed(jobs: str, max_tokens: int, max_requests: int = 100) -> str:
    """jobs: "A10 B20p": a name, tokens that are computed, and a page that it waits for."""
    names: dict[Job, str] = {}
    for word in jobs.split():
        digits = "".join(filter(str.isdigit, word))
        one = job(int(digits) + 1, cached=1)
        one.next_page = word[1 + len(digits) :] or None
        names[one] = word[0]
    return "".join(names[one] for one in pack(names, StepSize(max_tokens, max_requests)))


def test_others_join_in_order_while_their_tokens_fit() -> None:
    """C does not fit, and D, which would, is behind it: the order is the policy's."""
    assert packed("A10 B20 C30 D1", max_tokens=30) == "AB"
    assert packed("A10 B20 C30 D1", max_tokens=31) == "AB"
    assert packed("A10 B20 C30 D1", max_tokens=60) == "ABC"
    assert packed("A10 B20 C30 D1", max_tokens=61) == "ABCD"
    assert packed("A10 B20 C30 D1", max_tokens=61, max_requests=2) == "AB"


def test_the_best_one_runs_however_long_it_is() -> None:
    """A miss of 14,000 tokens exceeds any sensible limit."""
    assert packed("A14000 B1", max_tokens=100) == "A"
    assert packed("", max_tokens=100) == ""


def test_one_a_step_where_no_step_has_room() -> None:
    """The paper's engine."""
    assert packed("A10 B1", max_tokens=0) == "A"
    assert packed("A10 B1", max_tokens=100, max_requests=1) == "A"


def test_of_those_that_wait_for_one_page_only_the_first_goes() -> None:
    """A and C would both compute page p; B and D need nothing new from each other. C's tokens do not count."""
    assert packed("A10p B10q C10p D10 E10", max_tokens=40) == "ABDE"


def test_what_was_in_a_step_that_ran_out_of_memory_runs_alone() -> None:
    jobs = [job(5), job(5, runs_alone=True), job(5)]
    assert pack(jobs, StepSize(100, 10)) == jobs[:1]
    assert pack(jobs[1:], StepSize(100, 10)) == jobs[1:2]


def test_others_share_no_step_with_jobs_whose_answer_is_chosen_at_random() -> None:
    """SGLang samples for all requests of a step or for none, and a row of logits takes as long as some tokens."""
    scores = [job(5) for _ in range(2)]
    samples = [job(5, n_sampling_tokens=4) for _ in range(4)]
    in_order = [scores[0], *samples, scores[1]]
    assert pack(in_order, StepSize(100, 10)) == scores
    assert pack(in_order[1:], StepSize(100, 10)) == samples
    assert pack(in_order[1:], StepSize(2 * (5 + 4), 10)) == samples[:2]


def test_one_question_waits_for_one_step_at_most_beside_a_request_of_400() -> None:
    """13 parts of 32 questions about one state; what they compute is cached once the first of them has run."""
    parts = [job(2_040, n_branch_tokens=1_240, n_branches=31) for _ in range(13)]
    policy = srjf(*parts, step=StepSize(1_300, 100))
    (running,) = policy.decide(0.0).run
    policy.remove(running)
    for one in parts[1:]:
        calibrate(policy, one, cached=2_000)
    policy.add(question := job(240, 1.0, n_branch_tokens=40, n_branches=1))
    assert question in policy.decide(1.1).run


def test_tokens_are_counted_in_whole_pages() -> None:
    """Three jobs of 5 tokens take 8 each where a page has 4."""
    jobs = [job(6, cached=1) for _ in range(3)]
    assert len(pack(jobs, StepSize(16, 100, page_size=1))) == 3
    assert len(pack(jobs, StepSize(16, 100, page_size=4))) == 2
    assert StepSize(16, 100, page_size=4).tokens_of(5, 0) == 8
    assert StepSize(16, 100, page_size=4).tokens_of(500, 0) == 16


def test_a_step_is_full_by_its_time_where_attention_is_counted() -> None:
    """150 tokens behind 14,000 take as long as 150 + 2,100 of a first prompt where 1,000 pairs cost as much as a token."""
    size = StepSize(9_000, 100, pair_tokens=0.001)
    jobs = [job(14_150, cached=14_000) for _ in range(100)]
    assert size.price(14_150, 14_000) == 150 + 2_111
    assert [len(pack(jobs, size)), len(pack(jobs, size._replace(pair_tokens=0.0)))] == [3, 60]


def test_a_long_run_of_sharers_is_not_searched_to_its_end() -> None:
    """10,000 requests of one new user must not cost 10,000 looks in each step."""
    n_seen = 0

    def many() -> Iterator[Job]:
        nonlocal n_seen
        for _ in range(10_000):
            n_seen += 1
            one = job(2)
            one.next_page = "same"
            yield one

    assert len(pack(many(), StepSize(100, 100))) == 1
    assert n_seen == LOOK_AT


def test_the_full_price_begins_where_a_steps_fixed_cost_is_a_tenth_of_its_time() -> None:
    """9 ms a step and 0.1 ms a token: 810 tokens cost 90 ms with the step. Free tokens never fill a step."""
    model = FittedJct(step_ms=9.0, miss_token_ms=0.1, pair_ms=0.0, cached_token_ms=0.0)
    n_tokens = model.full_price_tokens()
    assert n_tokens == 810
    assert model(n_tokens, 0) == 90.0
    assert FittedJct(9.0, 0.0, 0.0, 0.0).full_price_tokens() is None
    assert FittedJct(0.1, 0.2, 0.0, 0.0).full_price_tokens() == 64, "a profile of a busy machine does not end packing"


def test_steps_are_filled_and_a_long_request_has_one_to_itself() -> None:
    """10 of 30 tokens fill 3 steps of 100; a miss of 14,000 takes one, not 140; places run out before tokens do."""

    def filled(lengths: list[int], size: StepSize) -> Steps:
        return fill_steps(sum(size.tokens_of(length, 0) for length in lengths), len(lengths), size)

    assert filled([30] * 10, StepSize(100, 32)) == Steps(3, room_tokens=0, room_requests=86)
    assert filled([14_000, 50], StepSize(100, 32)) == Steps(2, room_tokens=50, room_requests=62)
    assert filled([1] * 10, StepSize(100, 4)) == Steps(3, room_tokens=290, room_requests=2)
    assert filled([1] * 10, StepSize()) == Steps(10, room_tokens=0, room_requests=0)


def test_background_jobs_share_no_step_with_others_and_run_in_short_ones() -> None:
    """A step of 100 ms at most, of which 10 are fixed: 45 tokens of 2 ms each; others' steps take 1,000 tokens."""
    model = FittedJct(step_ms=10.0, miss_token_ms=2.0, pair_ms=0.0, cached_token_ms=0.0, request_ms=0.0)
    settings = PolicySettings(StepSize(1000, 100), predictor=Predictor(model), background_step_ms=100.0)
    for policy in (Fifo(settings), CalibratedSrjf(settings)):
        in_background = [job(20, rank=BACKGROUND) for _ in range(4)]
        live = [job(300, 1.0), job(300, 2.0)]
        for one in (*in_background, *live):
            policy.add(one)
        assert policy.decide(3.0).run == live
        assert policy.oldest() is live[0]
        for one in live:
            policy.remove(one)
        assert len(policy.decide(3.0).run) == 2
        assert policy.oldest() is None
