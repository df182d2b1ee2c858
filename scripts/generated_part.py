"""The part of a page that a script generates: `python -m scripts.NAME --write` writes it; without the flag it says whether the
page differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

END = "<!-- end -->\n"


class GeneratedPart(NamedTuple):
    path: Path  # of the page
    name: str  # of the part: it begins with a comment of this name
    made: Callable[[], str]

    def page(self) -> str:
        """The page as it must be."""
        begin = f"<!-- {self.name}: generated -->\n"
        before, _, rest = self.path.read_text().partition(begin)
        return f"{before}{begin}{self.made()}{END}{rest.partition(END)[2]}"

    def main(self) -> int:
        if "--write" in sys.argv:
            self.path.write_text(self.page())
        elif self.path.read_text() != self.page():
            print(
                f"{self.path.name} differs from what it is made of: run python -m scripts.{Path(sys.argv[0]).stem} --write"
            )
            return 1
        return 0
