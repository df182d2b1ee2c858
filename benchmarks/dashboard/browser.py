"""The dashboard in a real browser, in a process of its own, which looks until its standard input ends: `browser.py URL`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

SETTLE_MS = 8_000  # for the curves to have something to show
SIZE = {"width": 1280, "height": 2000}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--screenshots", type=Path, help="the folder that gets light.png and dark.png; then it ends")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark") if arguments.screenshots else ("light",):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(f"{arguments.url}/dashboard")
            expect(page.locator("#status")).to_have_text("live", timeout=60_000)
            if arguments.screenshots is None:
                print("looking", flush=True)
                sys.stdin.read()
            else:
                page.wait_for_timeout(SETTLE_MS)
                page.screenshot(path=arguments.screenshots / f"{scheme}.png", full_page=True)
            page.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
