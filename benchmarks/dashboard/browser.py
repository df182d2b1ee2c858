"""The dashboard in a real browser, in a process of its own, which looks until its standard input ends: `browser.py URL`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

DRAWN_MS = 2_000  # after the first snapshot
SETTLE_MS = 8_000  # for the curves to have something to show
SOME_WAIT = "Number(document.getElementById('waiting').dataset.value) > 50"
WINDOW, PICTURE = {"width": 1280, "height": 900}, {"width": 1280, "height": 1600}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--screenshots", type=Path, help="the folder that gets light.png and dark.png; then it ends")
    instead.add_argument(
        "--tiles", action="store_true", help="print the numbers of the first snapshot as JSON, and end"
    )
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark") if arguments.screenshots else ("light",):
            page = browser.new_page(viewport=PICTURE if arguments.screenshots else WINDOW, color_scheme=scheme)
            page.goto(f"{arguments.url}/dashboard")
            expect(page.locator("#status")).to_have_text("live", timeout=60_000)
            if arguments.screenshots:
                page.wait_for_timeout(SETTLE_MS)
                page.wait_for_function(SOME_WAIT)
                page.screenshot(path=arguments.screenshots / f"{scheme}.png", full_page=True)
            elif arguments.tiles:
                found = page.eval_on_selector_all(
                    "[data-value]", "all => all.map((one) => [one.id, one.dataset.value])"
                )
                print(json.dumps({name: float(value) for name, value in found if value}))
            else:
                page.wait_for_timeout(DRAWN_MS)
                print("looking", flush=True)
                sys.stdin.read()
            page.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
