"""The browser that tests look through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from anytrain.insight.pages.charts import area
from anytrain.insight.pages.markup import document, tag
from browsing import SCREENSHOTS, chromium, screenshot, scrolls_sideways, visit


def test_a_visit_hears_the_console_dialogs_errors_and_requests(browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><title>t</title><p style='width:3000px'>wide</p>"
        "<script>console.log('hello'); alert('now'); new Image().src = 'http://127.0.0.1:9/x';"
        "nothing.there</script>"
    )
    with visit(browser, page) as seen:
        seen.page.wait_for_function("document.readyState === 'complete'")
        assert "log: hello" in seen.console
        assert seen.dialogs == ["alert: now"]
        assert seen.requests == ["http://127.0.0.1:9/x"]
        assert "nothing is not defined" in seen.errors[0]
        assert scrolls_sideways(seen.page)


def test_a_quiet_page_is_quiet_and_its_picture_is_kept(browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>t</title><p>still")
    with visit(browser, page, dark=True, width=360) as seen:
        assert seen.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert not scrolls_sideways(seen.page)
        assert screenshot(seen.page, "test-quiet").parent == SCREENSHOTS
        (SCREENSHOTS / "test-quiet.png").unlink()
        seen.assert_quiet()


def test_the_tool_finds_the_browser_that_is_there() -> None:
    there, tool = chromium(), Path(__file__).parents[2] / "tools" / "browser.py"
    done = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == there


def test_a_page_keeps_its_style_inside_another_page(browser, tmp_path: Path) -> None:
    # As a notebook shows it: no script may run there.
    inner = document("inner", tag("h1", "Inner"), area([1.0, 2.0], str, title="t"))
    path = tmp_path / "page.html"
    path.write_text(document("outer", tag("iframe", srcdoc=inner, sandbox="")))
    with visit(browser, path, dark=True) as seen:
        body = seen.page.frame_locator("iframe").locator("body")
        assert body.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(21, 23, 26)"
        assert seen.console == seen.errors == []
