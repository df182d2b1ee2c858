"""Write 2,000 product reviews as a table, and a template with examples, for a batch job.

    python -m sgl_prefill.examples.review_table FOLDER
    python -m sgl_prefill.batch -i FOLDER/reviews.csv -o FOLDER/scores.jsonl --template @FOLDER/template.txt \
        --labels ' positive' ' negative' --id-column id

All rows share the examples, and the reviews of one product its description: two levels of prefixes, each computed once.
"""

from __future__ import annotations

import csv
import itertools
import random
import sys
from pathlib import Path

from sgl_prefill.examples.label_reviews import NEGATIVE, POSITIVE, few_shot_prompt

N_ROWS = 2000

KINDS = (
    "kettle",
    "backpack",
    "desk lamp",
    "headphones",
    "office chair",
    "blender",
    "tent",
    "keyboard",
    "jacket",
    "bicycle pump",
)
MAKERS = ("Norwick", "Alder & Fisk", "Tamsin", "Brightwater")
ABOUT = "{maker} {kind}, model {number}, sold since {year}, shipped with a two-year warranty and a printed manual."

GOOD = (
    "Arrived early and well packed.",
    "I love it and use it every day.",
    "Excellent quality for a fair price.",
    "My whole family is delighted with it.",
    "It looks beautiful and works perfectly.",
    "Support answered within minutes and was very kind.",
    "The best one that I have ever owned.",
)
BAD = (
    "It broke on the second day.",
    "The seller refuses a refund.",
    "Cheap material and terrible workmanship.",
    "I am disappointed and want my money back.",
    "It arrived two weeks late with a crushed box.",
    "Nobody answers the phone, awful service.",
    "A complete waste of money.",
)


def rows() -> list[dict[str, str]]:
    """Returns the table, its rows shuffled as tables are: id, product, review and truth."""
    rng = random.Random("reviews")
    products = [
        ABOUT.format(maker=maker, kind=kind, number=rng.randint(100, 999), year=rng.randint(2015, 2025))
        for maker, kind in itertools.product(MAKERS, KINDS)
    ]
    made = []
    for number in range(N_ROWS):
        truth = (POSITIVE, NEGATIVE)[number % 2]
        review = " ".join(rng.sample(GOOD if truth == POSITIVE else BAD, 3))
        made.append({"product": rng.choice(products), "review": review, "truth": truth})
    rng.shuffle(made)
    return [{"id": f"review-{number}", **row} for number, row in enumerate(made)]


def template() -> str:
    """Returns the prompt of a row: the examples, then its product and its review."""
    return few_shot_prompt() + "Product: {product}\nReview: {review}\nSentiment:"


def write(folder: Path) -> None:
    """Writes reviews.csv and template.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rows()
    with (folder / "reviews.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    (folder / "template.txt").write_text(template())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
