"""The dashboard in a real browser: Debian's Chromium, without a window."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import requests

from sgl_prefill.core.job import Job
from tests.integration.conftest import Server
from tests.support.dashboard_server import dashboard_server
from tests.support.filled_engine import FilledEngine, filled_engine

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: scripts/install.sh")
expect = playwright_api.expect
CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[1] / "support" / "axe" / "axe.min.js"
WAIT_MS = 30_000
N_WAITING = 10_000
HOSTILE = "<script>window.ran=1</script><img src=x>"  # 40 characters of a client's name are shown

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Looked(NamedTuple):
    """A page, and what a browser has said of it."""

    page: Any
    errors: list[str]
    hosts: set[str]

    def value(self, name: str) -> float:
        return float(self.page.locator(f"#{name}").get_attribute("data-value"))

    def is_live(self) -> None:
        expect(self.page.locator("#status")).to_have_text("live", timeout=WAIT_MS)


@contextmanager
def looking(browser: Any, url: str, *, is_refused: bool = False, **options: Any) -> Iterator[Looked]:
    """Opens the page; at its end nothing may have failed, and no other host been asked. is_refused: a 401 comes first."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    looked = Looked(context.new_page(), [], set())
    looked.page.set_default_timeout(WAIT_MS)
    looked.page.on("console", lambda said: looked.errors.append(said.text) if said.type == "error" else None)
    looked.page.on("pageerror", lambda error: looked.errors.append(str(error)))
    looked.page.on("request", lambda asked: looked.hosts.add(urlsplit(asked.url).hostname or "data"))
    looked.page.goto(url + "/dashboard")
    if not is_refused:
        looked.is_live()
    try:
        yield looked
        assert looked.hosts <= {"127.0.0.1", "data"}
        assert [error for error in looked.errors if not (is_refused and "401" in error)] == []
    finally:
        context.close()


@pytest.fixture(scope="module")
def engine() -> FilledEngine:
    """Ten thousand wait."""
    return filled_engine(N_WAITING, 3_000, now_s=time.perf_counter(), first_prefix=[7] * 400)


@pytest.fixture(scope="module")
def filled(engine: FilledEngine) -> Iterator[str]:
    with dashboard_server(engine) as url:
        yield url


def test_ten_thousand_waiting_requests_are_counted_in_every_tile(browser: Any, filled: str) -> None:
    """Histograms hold all of them; the table of the next step says why each is in it. Charts are drawn as they come into view."""
    with looking(browser, filled) as looked:
        assert looked.value("waiting") == N_WAITING
        for histogram in ("by-age", "by-predicted"):
            counts = looked.page.locator(f"#{histogram}").get_attribute("data-counts").split(",")
            assert sum(map(int, counts)) == N_WAITING
        assert looked.value("requests") == 2_000
        assert looked.value("refused") == 5
        rows = looked.page.locator("#next tbody tr")
        assert rows.first.locator("td").first.text_content() == "first"
        assert rows.nth(1).locator("td").first.text_content() == "rides along"
        assert looked.page.locator("#client-table tbody tr").count() > 5
        assert looked.page.locator("#memory-bar .cell").count() >= 3  # one is narrower than a pixel
        looked.page.wait_for_selector("#tree .cell")
        for chart in ("by-age", "by-predicted", "predicted-actual", "step-tokens", "rates"):
            looked.page.locator(f"#{chart}").scroll_into_view_if_needed()
            looked.page.wait_for_selector(f"#{chart} canvas")


def test_a_client_whose_name_is_a_program_is_shown_as_text(browser: Any) -> None:
    """Neither its elements nor its script exist in the page."""
    engine = filled_engine(0, 100, now_s=time.perf_counter())
    assert engine.state.scheduling is not None
    engine.state.scheduling.live.arrive(Job(array("q", [1, 2]), time.perf_counter(), 1, client=HOSTILE))
    with dashboard_server(engine) as url, looking(browser, url) as looked:
        expect(looked.page.locator("#next tbody tr").first.locator("td").last).to_have_text(HOSTILE, timeout=WAIT_MS)
        assert looked.page.locator("script").count() == 1
        assert looked.page.locator("img").count() == 0
        assert looked.page.evaluate("window.ran === undefined")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_and_a_phone_scrolls_only_down(browser: Any, filled: str, scheme: str, width: int) -> None:
    """axe-core's whole list of rules, in both colour schemes that a system may ask for."""
    options: Any = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    with looking(browser, filled, **options) as looked:
        assert looked.page.evaluate("document.documentElement.dataset.theme") == scheme
        looked.page.locator("#tree").scroll_into_view_if_needed()
        looked.page.wait_for_selector("#tree .cell")
        looked.page.evaluate(AXE.read_text() + "; 0")
        found = looked.page.evaluate("axe.run()")["violations"]
        problems = "\n".join(f"{one['id']}: {one['nodes'][0]['html']}" for one in found)
        assert not problems, problems
        assert looked.page.evaluate("document.scrollingElement.scrollWidth") <= width
        cells = looked.page.locator("#next td, #client-table td")
        heights = cells.evaluate_all(
            "all => all.map((one) => one.clientHeight / parseFloat(getComputedStyle(one).fontSize))"
        )
        assert max(heights) < 3  # one line: no word is broken


def test_everything_is_reached_by_keyboard(browser: Any, filled: str) -> None:
    """Tab comes by every control; Enter on the switch changes the colours, and a reload keeps them."""
    with looking(browser, filled, color_scheme="light") as looked:
        reached = set()
        for _ in range(20):
            looked.page.keyboard.press("Tab")
            focused = looked.page.evaluate("document.activeElement.id")
            if focused == "theme" and focused not in reached:
                looked.page.keyboard.press("Enter")
            reached.add(focused)
        assert {"rate", "theme", "tree-by", "prompt", "labels"} <= reached
        assert looked.page.evaluate("document.documentElement.dataset.theme") == "dark"
        looked.page.reload()
        looked.is_live()
        assert looked.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_page_survives_a_restart_of_its_server(browser: Any, engine: FilledEngine) -> None:
    """It says that there is no connection, and shows the new server's numbers as soon as there is one."""
    other = filled_engine(7, 100, now_s=time.perf_counter())
    context = browser.new_context()
    page = context.new_page()
    with dashboard_server(engine) as url:
        page.goto(url + "/dashboard")
        expect(page.locator("#waiting")).to_have_text("10,000", timeout=WAIT_MS)
    expect(page.locator("#status")).to_have_text("no connection, trying again", timeout=WAIT_MS)
    with dashboard_server(other, port=urlsplit(url).port or 0):
        expect(page.locator("#waiting")).to_have_text("7", timeout=WAIT_MS)
        expect(page.locator("#status")).to_have_text("live", timeout=WAIT_MS)
        context.close()


@pytest.mark.filterwarnings("ignore:ORJSONResponse")  # SGLang's
def test_without_the_key_a_page_knows_nothing_and_asks_for_it(browser: Any, engine: FilledEngine) -> None:
    """The page's own status is 401; a wrong key is asked for again, the right one opens the stream."""
    with dashboard_server(engine, api_key="right") as url:
        assert requests.get(url + "/dashboard", timeout=9).status_code == 401
        assert requests.get(url + "/dashboard/events", timeout=9).status_code == 401
        allowed = requests.get(url + "/dashboard", headers={"Authorization": "Bearer right"}, timeout=9)
        assert allowed.status_code == 200
        with looking(browser, url, is_refused=True) as looked:
            for key in ("wrong", "right"):
                expect(looked.page.locator("#key-form")).to_be_visible(timeout=WAIT_MS)
                assert looked.page.locator("#waiting").text_content() == ""
                looked.page.fill("#key", key)
                looked.page.keyboard.press("Enter")
            looked.is_live()
            assert looked.value("waiting") == N_WAITING


def metric(server: Server, name: str) -> float:
    lines = requests.get(server.url + "/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"sglang:prefill_{name}{{"))


COUNTED = {
    "cached": "cached_tokens_total",
    "kept": "kept_tokens_total",
    "evicted": "evicted_tokens_total",
    "requests": "wait_seconds_count",
    "refused": "refused_requests_total",
}


def test_tiles_show_what_metrics_say_under_live_traffic(browser: Any, server: Server) -> None:
    """What only grows lies between two looks at /metrics while requests run, and is equal once they have ended."""
    is_over = threading.Event()

    def send() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            server.scores([f"One two three four five {number} {place}" for place in range(8)], allowed_tokens=[" a"])

    assert server.post("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 99}).status_code == 400
    with looking(browser, server.url) as looked:
        before = {tile: metric(server, name) for tile, name in COUNTED.items()}
        traffic = threading.Thread(target=send)
        traffic.start()
        try:
            expect(looked.page.locator("#requests")).not_to_have_attribute(
                "data-value", str(int(before["requests"])), timeout=WAIT_MS
            )
            expect(looked.page.locator("#requests-per-s")).not_to_have_text("", timeout=WAIT_MS)
            shown = {tile: looked.value(tile) for tile in COUNTED}
            after = {tile: metric(server, name) for tile, name in COUNTED.items()}
        finally:
            is_over.set()
            traffic.join()
        assert all(before[tile] <= shown[tile] <= after[tile] for tile in COUNTED), (before, shown, after)
        for tile, name in COUNTED.items():
            expect(looked.page.locator(f"#{tile}")).to_have_attribute(
                "data-value", str(int(metric(server, name))), timeout=WAIT_MS
            )
        assert looked.value("refused") >= 1
        assert looked.value("waiting") == metric(server, "waiting_requests") == 0


def test_the_docs_list_the_fields_of_replies(browser: Any, server: Server) -> None:
    with looking(browser, server.url) as looked:
        looked.page.goto(server.url + "/docs")
        looked.page.locator("summary", has_text="POST /v1/completions").click()
        field = looked.page.get_by_text("choices[].label_scores.labels[].probability", exact=True)
        expect(field.first).to_be_visible(timeout=WAIT_MS)


def test_a_labelled_prompt_is_answered_as_the_route_answers_it(browser: Any, server: Server) -> None:
    """The same best label and probability, and an error as a sentence."""
    prompt, labels = "The capital of France is", [" Paris", " Rome"]
    best = server.scores(prompt, allowed_tokens=labels)[0]["labels"][0]
    with looking(browser, server.url) as looked:
        looked.page.fill("#prompt", prompt)
        looked.page.fill("#labels", "\n".join(labels))
        looked.page.click("#ask-form button")
        row = looked.page.locator("#distribution tbody tr").first.locator("td")
        expect(row.first).to_have_text(f'"{best["label"]}"', timeout=WAIT_MS)
        assert abs(float(row.nth(1).text_content()) - best["probability"]) < 0.01
        assert looked.value("ask-tokens") == 5
        assert looked.value("ask-predicted") > 0
        looked.page.fill("#question", "Which city is it?")
        looked.page.click("#ask-form button")
        expect(row.first).to_have_text(re.compile('^"(Paris|Rome)"$'), timeout=WAIT_MS)
        assert looked.value("ask-tokens") > 20
        looked.page.fill("#question", "")
        looked.page.fill("#labels", " Paris\n Paris")
        looked.errors.clear()
        looked.page.click("#ask-form button")
        expect(looked.page.locator("#ask-error")).not_to_have_text("", timeout=WAIT_MS)
        looked.errors[:] = [error for error in looked.errors if "400" not in error]  # the browser's own line
