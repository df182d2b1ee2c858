"""The dashboard in a real browser, in a process of its own, which looks until its standard input ends: `browser.py URL`."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

DRAWN_MS = 2_000  # after the first snapshot
SETTLE_MS = 8_000  # for the curves to have something to show
SOME_WAIT = re.compile(r"[\d,]{3,}")  # a hundred at least
WINDOW, PICTURE = {"width": 1280, "height": 900}, {"width": 900, "height": 1100}
PICTURE_SCALE = 1.5  # pixels per CSS pixel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--screenshot", type=Path, help="the file that gets a picture of the queue; then it ends")
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
        options = (
            {"viewport": PICTURE, "device_scale_factor": PICTURE_SCALE}
            if arguments.screenshot
            else {"viewport": WINDOW}
        )
        page = browser.new_page(color_scheme="light", **options)
        page.goto(f"{arguments.url}/dashboard")
        expect(page.locator("#status")).to_have_text("live", timeout=60_000)
        if arguments.screenshot:
            page.wait_for_timeout(SETTLE_MS)
            expect(page.locator("#waiting")).to_have_text(SOME_WAIT, timeout=60_000)
            page.locator("#now").screenshot(path=arguments.screenshot)
        elif arguments.tiles:
            found = page.eval_on_selector_all("[data-value]", "all => all.map((one) => [one.id, one.dataset.value])")
            print(json.dumps({name: float(value) for name, value in found if value}))
        else:
            page.wait_for_timeout(DRAWN_MS)
            print("looking", flush=True)
            sys.stdin.read()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
