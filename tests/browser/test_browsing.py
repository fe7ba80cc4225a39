"""The browser that tests look through."""

from __future__ import annotations

from pathlib import Path

from browsing import SCREENSHOTS, screenshot, scrolls_sideways, visit


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
