"""Label 24 reviews behind one long few-shot prompt, and rank them by P(positive).

    python -m sgl_prefill.examples.label_reviews [--url http://127.0.0.1:30000]

All 24 requests are sent at once. They share the few-shot prompt, which one computes and the others find cached.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from sgl_prefill.examples import client

POSITIVE, NEGATIVE = " positive", " negative"

SHOTS = (
    ("The pasta was cooked perfectly and our waiter could not have been kinder.", POSITIVE),
    ("Two of the six glasses arrived broken and nobody answers the phone.", NEGATIVE),
    ("I finished the whole series in a weekend, the acting is superb.", POSITIVE),
    ("The app logs me out every hour and then loses my work.", NEGATIVE),
    ("Easy to assemble, sturdy, and it looks better than in the pictures.", POSITIVE),
    ("We waited ninety minutes for cold soup and got no apology.", NEGATIVE),
    ("Quiet room, soft bed, and the best breakfast of our trip.", POSITIVE),
    ("The zipper broke on the first day and the fabric feels cheap.", NEGATIVE),
    ("My daughter learned to read with this book and asks for it every night.", POSITIVE),
    ("A dull plot, wooden dialogue, and an ending that makes no sense.", NEGATIVE),
    ("Support replied within minutes and sent a replacement the same day.", POSITIVE),
    ("The battery is dead by noon and the screen flickers all the time.", NEGATIVE),
)

REVIEWS = (
    ("This blender crushes ice in seconds and cleans up easily. I love it.", POSITIVE),
    ("The concert was magical, we sang along to every song.", POSITIVE),
    ("Friendly staff, fair prices, and a wonderful view of the lake.", POSITIVE),
    ("The best headphones I have ever owned, warm sound and very comfortable.", POSITIVE),
    ("Delivered early, well packed, and exactly as described.", POSITIVE),
    ("A beautiful film that made me laugh and cry.", POSITIVE),
    ("The guide was excellent and showed us hidden corners of the city.", POSITIVE),
    ("Great coffee, fresh cakes, and a lovely garden to sit in.", POSITIVE),
    ("These shoes are light and fit perfectly, I walk for hours in them.", POSITIVE),
    ("Our new vacuum is quiet and powerful, a joy to use.", POSITIVE),
    ("The doctor took her time and explained everything with patience.", POSITIVE),
    ("An inspiring book, I have already given three copies to friends.", POSITIVE),
    ("The heater stopped working after a week and the shop refused a refund.", NEGATIVE),
    ("Rude staff, dirty tables, and the food made me sick.", NEGATIVE),
    ("The update made my phone so slow that I cannot use it any more.", NEGATIVE),
    ("Boring from the first page to the last, a waste of time.", NEGATIVE),
    ("The package came two weeks late and the box was crushed.", NEGATIVE),
    ("Terrible picture quality, and the remote does not work.", NEGATIVE),
    ("The room smelled of smoke and the shower was broken.", NEGATIVE),
    ("I was charged twice and nobody wants to give my money back.", NEGATIVE),
    ("The chair is so uncomfortable that my back hurts after an hour.", NEGATIVE),
    ("A horrible flight, delayed for six hours without any information.", NEGATIVE),
    ("The seams split in the first wash, very poor quality.", NEGATIVE),
    ("The game crashes all the time and the story is a disappointment.", NEGATIVE),
)


class Row(NamedTuple):
    """One labelled review."""

    text: str
    truth: str
    scores: dict[str, Any]

    @property
    def p_positive(self) -> float:
        return client.probability(self.scores, POSITIVE)

    @property
    def is_right(self) -> bool:
        return (self.p_positive > 0.5) == (self.truth == POSITIVE)


def few_shot_prompt() -> str:
    """Returns the task and its examples, which all prompts share."""
    shots = "".join(f"Review: {text}\nSentiment:{label}\n\n" for text, label in SHOTS)
    return f"Decide whether the review is positive or negative.\n\n{shots}"


def prompt_for(review: str) -> str:
    """Returns the shared few-shot prompt, then this review."""
    return f"{few_shot_prompt()}Review: {review}\nSentiment:"


def label_all(url: str) -> list[Row]:
    """Labels all reviews at once, most positive first; progress on stderr."""
    openai_client = client.connect(url)

    def label(review: tuple[str, str]) -> Row:
        row = Row(*review, client.score(openai_client, prompt_for(review[0]), (POSITIVE, NEGATIVE)))
        print(".", end="", file=sys.stderr, flush=True)
        return row

    print(f"labelling {len(REVIEWS)} reviews ", end="", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(len(REVIEWS)) as pool:
        rows = list(pool.map(label, REVIEWS))
    print(" done", file=sys.stderr)
    return sorted(rows, key=lambda row: -row.p_positive)


def table(rows: list[Row]) -> str:
    """Writes the table, ranked, with the share labelled right in the last line."""
    lines = [
        f"{'P(pos)':>6}  {'mass':>5}  {'cached':>6}  {'queue ms':>8}  {'pred. ms':>8}  {'actual ms':>9}     review"
    ]
    for row in rows:
        s = row.scores
        predicted = "-" if s["predicted_jct_ms"] is None else f"{s['predicted_jct_ms']:.1f}"
        lines.append(
            f"{row.p_positive:6.3f}  {s['label_mass']:5.2f}  {s['cached_tokens']:6d}  {s['queue_ms']:8.1f}  {predicted:>8}"
            f"  {s['actual_ms']:9.1f}  {'ok' if row.is_right else 'NO'}  {row.text[:60]}"
        )
    n_right = sum(row.is_right for row in rows)
    lines.append(f"labelled right: {n_right} of {len(rows)} ({n_right / len(rows):.0%})")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(label_all(client.parse_url(__doc__))))
