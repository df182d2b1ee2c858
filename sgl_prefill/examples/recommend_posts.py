"""Recommend posts to one user, in the paper's form (PrefillOnly, section 2.3): P(Yes) for each of 12 posts.

    python -m sgl_prefill.examples.recommend_posts [--url http://127.0.0.1:30000]

The user's profile and history are a few thousand tokens that stand in front of every post, so they are computed once.
The demo model is far too small to recommend well: look at the cached tokens and the times, not at the ranking.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sgl_prefill.examples import client

YES, NO = " Yes", " No"

INTERESTS = (
    "mountain biking",
    "sourdough baking",
    "open-source databases",
    "jazz piano",
    "birdwatching",
    "city planning",
)
VERBS = ("read", "liked", "shared", "saved", "commented on", "finished")
FORMATS = (
    "a long article about",
    "a short video on",
    "a beginner's guide to",
    "an interview on",
    "news about",
    "a photo story on",
)
N_HISTORY_LINES = 200

POSTS = (
    "Ten quiet trails for mountain bikes within an hour of the city",
    "Why your sourdough starter smells of apples, and what to do",
    "Celebrity couple seen at the airport again",
    "A new storage engine for an open-source database, explained",
    "Learning jazz piano after forty: a diary",
    "Quarterly results of a large insurance company",
    "How to tell a marsh warbler from a reed warbler by its song",
    "Bicycle lanes and bakeries: what makes a street lively",
    "Ranking every season of a dating show",
    "Transactions without locks: a tour of snapshot isolation",
    "The return of the night train",
    "Five gadgets that you do not need",
)


class Recommendation(NamedTuple):
    """One post and its score for this user."""

    post: str
    p_yes: float
    scores: dict[str, Any]


def profile() -> str:
    """Makes the profile and history of a made-up user, the same at every call."""
    lines = [
        f"{day + 1}. {VERBS[day % 6]} {FORMATS[(day // 6) % 6]} {INTERESTS[(day * 5 + day // 36) % 6]}, {3 + day % 17} minutes"
        for day in range(N_HISTORY_LINES)
    ]
    return "The user likes " + ", ".join(INTERESTS) + ". Browsing history, oldest first:\n" + "\n".join(lines)


def prompt_for(post: str, user_profile: str) -> str:
    return (
        "You are a recommendation assistant. Here is the profile of a user.\n\n"
        f"{user_profile}\n\nWill the user be interested in reading the following post? Answer Yes or No.\n\n"
        f"Post: {post}\nAnswer:"
    )


def recommend(url: str) -> list[Recommendation]:
    """Asks for all posts in one call (a batch of prompts), most interesting first."""
    user_profile = profile()
    reply = client.connect(url).completions.create(
        model="default",
        prompt=[prompt_for(post, user_profile) for post in POSTS],
        extra_body={"allowed_tokens": [YES, NO]},
    )
    ranked = []
    for post, choice in zip(POSTS, reply.choices, strict=True):
        scores: dict[str, Any] = choice.model_extra["label_scores"]  # type: ignore[index]
        ranked.append(Recommendation(post, client.probability(scores, YES), scores))
    return sorted(ranked, key=lambda one: -one.p_yes)


def table(ranked: list[Recommendation]) -> str:
    lines = [f"{'P(Yes)':>6}  {'tokens':>6}  {'cached':>6}  {'queue ms':>8}  {'actual ms':>9}  post"]
    lines += [
        f"{one.p_yes:6.3f}  {one.scores['prompt_tokens']:6d}  {one.scores['cached_tokens']:6d}"
        f"  {one.scores['queue_ms']:8.1f}  {one.scores['actual_ms']:9.1f}  {one.post}"
        for one in ranked
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(recommend(client.parse_url(__doc__))))
