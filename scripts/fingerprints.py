"""Compares the installed SGLang with the recorded sources of the functions that the hooks touch.

python scripts/fingerprints.py            list what differs, exit 1 if anything does
python scripts/fingerprints.py --write    after reading the differences: accept the installed source
"""

from __future__ import annotations

import json
import sys

from sgl_prefill.entry.fingerprints import FINGERPRINT_FILE, differing, fingerprint
from sgl_prefill.entry.hooks import fingerprinted_targets


def main(argv: list[str]) -> int:
    targets = fingerprinted_targets()
    if argv == ["--write"]:
        FINGERPRINT_FILE.write_text(json.dumps({t: fingerprint(t) for t in sorted(targets)}, indent=1) + "\n")
    lines = differing(targets)
    print("\n".join(lines) or f"all {len(targets)} targets are as recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
