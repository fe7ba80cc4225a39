"""Open pages in the system's Chromium, and hear everything that they say and ask for.

    def test_the_page_is_quiet(browser):
        with visit(browser, path) as seen:
            seen.page.get_by_role("heading", level=1).wait_for()
            screenshot(seen.page, "report")
            seen.assert_quiet()

The fixture `browser` is there for every test under tests/browser/.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import needs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENSHOTS = Path(__file__).resolve().parents[1] / "build" / "screenshots"


def chromium() -> str:
    """Return where the system's Chromium lies; skip where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None) or needs.tool(
        NAMES[0]
    )


# Of one file: Playwright's loop runs as long as the browser does, and a test that starts a loop
# of its own in the same process could not.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A running browser."""
    path = chromium()
    needs.tool("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # CI is root in a container, where Chromium's sandbox cannot start.
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@dataclass
class Visit:
    """A page that was opened, and what came of it."""

    page: Page
    console: list[str] = field(default_factory=list)
    """What was written to the console, as "type: text"."""
    errors: list[str] = field(default_factory=list)
    """Exceptions that nothing caught."""
    dialogs: list[str] = field(default_factory=list)
    """What alert() and its like asked."""
    requests: list[str] = field(default_factory=list)
    """Addresses asked for, but for the page itself."""

    def assert_quiet(self) -> None:
        """Fail if there was an error, a line on the console, a dialog or a request."""
        heard = {
            "errors": self.errors,
            "console": self.console,
            "dialogs": self.dialogs,
            "requests": self.requests,
        }
        said = {name: lines for name, lines in heard.items() if lines}
        assert not said, said


@contextmanager
def visit(
    browser: Browser,
    where: str | Path,
    *,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    **context: Any,
) -> Iterator[Visit]:
    """Open a file or an address; `context` goes to Playwright's new_context."""
    address = where.resolve().as_uri() if isinstance(where, Path) else where
    scheme = "dark" if dark else "light"
    surroundings = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, **context
    )
    surroundings.set_default_timeout(240_000)
    seen = Visit(surroundings.new_page())
    _listen(seen, address)
    try:
        seen.page.goto(address)
        yield seen
    finally:
        surroundings.close()


def screenshot(page: Page, name: str, *, whole: bool = True) -> Path:
    """Keep a picture of the page (all of it, unless told) in build/screenshots."""
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, full_page=whole)
    return path


def until(page: Page, condition: str) -> None:
    """Wait until a condition holds; Playwright's own waiting needs a policy that allows eval."""
    deadline = time.monotonic() + 240
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def scrolls_sideways(page: Page) -> bool:
    """Whether the page is wider than its window."""
    root = "document.documentElement"
    return bool(page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"))


def _listen(seen: Visit, address: str) -> None:
    page = seen.page

    def refuse(dialog: Any) -> None:
        seen.dialogs.append(f"{dialog.type}: {dialog.message}")
        dialog.dismiss()

    def note(request: Any) -> None:
        if request.url.partition("#")[0] != address.partition("#")[0]:
            seen.requests.append(request.url)

    page.on("console", lambda message: seen.console.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("dialog", refuse)
    page.on("request", note)
