"""The examples of the README, against the shared server."""

from __future__ import annotations

from sgl_prefill.examples import label_reviews, recommend_posts
from tests.integration.conftest import Server


def test_the_reviews_are_separated_and_share_their_few_shot_prompt(server: Server) -> None:
    """All 24 labelled right, one computes the shared prompt, the others find it cached."""
    rows = label_reviews.label_all(server.url)
    assert sum(row.is_right for row in rows) == 24
    assert [row.p_positive for row in rows] == sorted((row.p_positive for row in rows), reverse=True)
    shared = max(row.scores["cached_tokens"] for row in rows)
    assert shared > 250
    assert sum(row.scores["cached_tokens"] < 250 for row in rows) <= 1
    assert "labelled right: 24 of 24 (100%)" in label_reviews.table(rows)


def test_the_profile_of_the_recommendation_example_is_computed_once(server: Server) -> None:
    """12 posts behind a few thousand tokens: 11 of them compute their own post alone."""
    ranked = recommend_posts.recommend(server.url)
    assert sorted(one.post for one in ranked) == sorted(recommend_posts.POSTS)
    profile_tokens = 2000
    computed = sorted(one.scores["prompt_tokens"] - one.scores["cached_tokens"] for one in ranked)
    assert all(n_tokens < 50 for n_tokens in computed[:11])
    assert computed[11] > profile_tokens
    assert all(0 < one.p_yes < 1 for one in ranked)
    assert recommend_posts.table(ranked).count("\n") == 12
