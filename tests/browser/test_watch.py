"""The live page in a real browser, on a run in progress."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from anytrain.insight.report.web import Server, Source
from browsing import Visit, screenshot, scrolls_sideways, visit
from launching import child_environment, script_file
from made_records import Record
from slow_training import TRAINING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NASTY = "</script><img src=x onerror=alert(1)>"
IS_TOO_WIDE = """Object.values(anytrain.plots).some(
    (plot) => plot.width > plot.root.closest('figure').clientWidth)"""
POINTS = "Object.values(anytrain.plots['figure loss']?.data[1] ?? []).length"


@contextmanager
def serving(folder: Path, *, port: int = 0) -> Iterator[Server]:
    """Serve a run's page with a token that is known; look at the record five times a second."""
    server = Server(Source(folder), port, token="known")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            server.source.look()

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield server
    finally:
        over.set()
        looking.join()
        server.source.close()
        server.shutdown()
        server.server_close()


def await_points(page: Page, least: int, seconds: float = 30.0) -> int:
    """Wait until the chart of the loss has so many points; return how many it has.

    Playwright's own wait evaluates text in the page, which the page's policy forbids.
    """
    until = time.monotonic() + seconds
    while (found := int(page.evaluate(POINTS))) < least:
        assert time.monotonic() < until, f"{found} points, not {least}, after {seconds} s"
        page.wait_for_timeout(100)
    return found


def assert_asks_only(seen: Visit, server: Server) -> None:
    """Fail if the page asked anybody but its server, or complained."""
    hosts = {urlsplit(address).netloc for address in seen.requests}
    assert hosts <= {f"127.0.0.1:{server.server_port}"}, hosts
    assert not (seen.console or seen.errors or seen.dialogs), seen


def test_points_arrive_on_a_run_in_progress_without_a_reload(
    browser: Browser, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with (
        script_file(TRAINING) as script,
        serving(folder) as server,
        visit(browser, server.address) as seen,
    ):
        page = seen.page
        page.get_by_text("Waiting for the record").wait_for()
        loads: list[str] = []
        page.on("framenavigated", lambda frame: loads.append(frame.url))
        page.evaluate("window.isTheSame = true")
        training = subprocess.Popen(
            [sys.executable, str(script), str(folder), "1000000"],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
        )
        try:
            counts = []
            for least in (1, 4, 7):
                counts.append(await_points(page, least, seconds=240))
            assert counts == sorted(counts) and counts[-1] > counts[0]
            assert "running" in (page.locator("#words").text_content() or "")
            assert page.get_by_text("Left", exact=True).count() == 1
            screenshot(page, "watch-running")
        finally:
            training.kill()
            training.wait()
        page.get_by_text("The run was killed after step").wait_for(timeout=240_000)
        assert page.evaluate("window.isTheSame") and loads == []
        assert page.title() == "run: broken"
        assert page.get_by_text("Left", exact=True).count() == 0
        assert not page.evaluate(IS_TOO_WIDE) and not scrolls_sideways(page)
        screenshot(page, "watch-killed")
        assert_asks_only(seen, server)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    found = Record(tmp_path / "run")
    found.begin()
    found.train(range(1, 101))
    found.log(100, eval_loss=0.2, eval_runtime=1.0)
    found.event("checkpoint", path="checkpoint-100", bytes=1)
    return found


def test_the_end_of_a_run_is_shown(browser: Browser, record: Record) -> None:
    with serving(record.folder) as server, visit(browser, server.address) as seen:
        await_points(seen.page, 10)
        record.train(range(101, 1001))
        record.end(1000)
        seen.page.get_by_text("Training done.").wait_for(timeout=240_000)
        assert seen.page.title() == "run: finished"
        assert seen.page.locator("#count").text_content() == "step 1,000 of 1,000 (100 %)"
        screenshot(seen.page, "watch-finished")
        assert_asks_only(seen, server)


def test_two_tabs_follow_at_once_and_keep_their_zoom(browser: Browser, record: Record) -> None:
    with (
        serving(record.folder) as server,
        visit(browser, server.address) as first,
        visit(browser, server.address, dark=True) as second,
    ):
        for seen in (first, second):
            await_points(seen.page, 10)
        first.page.evaluate("anytrain.plots['figure loss'].setScale('x', {min: 20, max: 40})")
        record.train(range(101, 201))
        for seen in (first, second):
            await_points(seen.page, 20)
            told = seen.page.locator("figure[data-chart='figure loss'] .u-legend").text_content()
            assert "200" in (told or "")  # the last step, where nobody points
        scale = first.page.evaluate("anytrain.plots['figure loss'].scales.x")
        assert (scale["min"], scale["max"]) == (20, 40)
        screenshot(second.page, "watch-dark")
        for seen in (first, second):
            assert_asks_only(seen, server)


def test_a_lost_connection_is_told_and_taken_up_again(browser: Browser, record: Record) -> None:
    with serving(record.folder) as server:
        port = server.server_port
        opened = visit(browser, server.address)
        seen = opened.__enter__()
        await_points(seen.page, 10)
        lost = seen.page.get_by_role("alert")
        assert not lost.is_visible()
    try:
        lost.wait_for(timeout=240_000)
        assert "Connection lost" in (lost.text_content() or "")
        screenshot(seen.page, "watch-lost", whole=False)
        record.train(range(101, 151))
        with serving(record.folder, port=port):
            await_points(seen.page, 15)
            lost.wait_for(state="hidden")
            record.end(150)
            seen.page.get_by_text("Training done.").wait_for()
        assert not seen.errors
    finally:
        opened.__exit__(None, None, None)


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, record: Record) -> None:
    with serving(record.folder) as server, visit(browser, server.address, width=360) as seen:
        await_points(seen.page, 10)
        assert not scrolls_sideways(seen.page)
        screenshot(seen.page, "watch-phone")
        assert_asks_only(seen, server)


def test_nothing_that_a_run_wrote_runs_in_the_page(browser: Browser, record: Record) -> None:
    record.event("notice", text=NASTY)
    record.log(100, **{NASTY: 1.5, "loss": float("nan"), "note": NASTY})
    with serving(record.folder) as server, visit(browser, server.address) as seen:
        seen.page.get_by_text(re.compile("notice: .*onerror")).wait_for()
        record.log(110, **{f"{NASTY}2": 2.5, "loss": 0.1})
        record.event("notice", text=f"later {NASTY}")
        seen.page.get_by_text(re.compile("notice: later .*onerror")).wait_for()
        assert seen.page.locator("img").count() == 0
        assert_asks_only(seen, server)
