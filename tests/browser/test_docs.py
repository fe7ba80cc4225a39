"""The device guides in a browser, in four languages: right to left where it should be."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

from browsing import Visit, screenshot, scrolls_sideways, visit
from launching import run_command

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("mkdocs_static_i18n")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
GUIDES = ("apple-silicon", "tpu-notebook")
# Arabic is where a page can go wrong by itself; the others are looked at in the full run.
LANGUAGES = ("ar", *(pytest.param(each, marks=pytest.mark.full) for each in ("en", "ko", "zh")))
# Where each line of an element's text begins and ends, in pixels; a line's boxes overlap in height.
_LINES = """(element) => {
  const range = document.createRange();
  range.selectNodeContents(element);
  const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
  const lines = [];
  for (const box of boxes.sort((a, b) => a.bottom - b.bottom)) {
    const line = lines.at(-1);
    if (line && (box.top + box.bottom) / 2 < line.bottom) {
      line.left = Math.min(line.left, box.left);
      line.right = Math.max(line.right, box.right);
    } else {
      lines.push({ left: box.left, right: box.right, bottom: box.bottom });
    }
  }
  return lines;
}"""
# Where each of some pieces of an element's text is drawn.
_PIECES = """(element, pieces) => {
  const node = element.firstChild;
  return pieces.map((piece) => {
    const range = document.createRange();
    const start = node.data.indexOf(piece);
    range.setStart(node, start);
    range.setEnd(node, start + piece.length);
    return range.getBoundingClientRect().left;
  });
}"""

# What scrolls sideways in its frame: tables that are drawn, by their first words.
_WIDE = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")]
  .filter((frame) => frame.scrollWidth > frame.clientWidth)
  .map((frame) => frame.innerText.slice(0, 60))"""


class Quiet(SimpleHTTPRequestHandler):
    """Serve files, and write no log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the built site is served, on this machine alone."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    run_command(words, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def guide(site: str, language: str, name: str) -> str:
    return f"{site}{'' if language == 'en' else f'{language}/'}guides/{name}.html"


def has_table(address: str) -> bool:
    with urlopen(address) as answer:
        return b"<table>" in answer.read()


def assert_harmless(seen: Visit, site: str) -> None:
    """Fail if something went wrong on the page, or it asked for anything from elsewhere."""
    assert seen.errors == []
    assert seen.dialogs == []
    assert [address for address in seen.requests if not address.startswith((site, "data:"))] == []


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_guide_opens_in_its_language_fits_a_phone_and_needs_no_other_host(
    browser: Browser, site: str, language: str, name: str
) -> None:
    with visit(browser, guide(site, language, name)) as seen:
        page = seen.page
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.lang") == language
        assert page.locator("h1").count() == 1
        assert page.locator(".md-typeset pre").count() >= 8
        assert page.locator('.md-typeset [lang="en"]').count() == 0
        screenshot(page, f"docs-{name}-{language}")
        assert_harmless(seen, site)
        page.set_viewport_size({"width": 360, "height": 740})
        screenshot(page, f"docs-{name}-{language}-phone")
        assert not scrolls_sideways(page)
        table = page.locator(".md-typeset__scrollwrap").last
        assert table.evaluate("each => each.scrollWidth > each.clientWidth")  # it does, by itself


@pytest.mark.parametrize("name", GUIDES)
def test_arabic_runs_from_right_to_left(browser: Browser, site: str, name: str) -> None:
    with visit(browser, guide(site, "ar", name)) as seen:
        page = seen.page
        first = page.locator(".md-typeset > p").first
        assert page.evaluate("getComputedStyle(document.body).direction") == "rtl"
        lines = first.evaluate(_LINES)
        assert len(lines) >= 2  # they end in one column on the right, and are ragged on the left
        assert len({round(line["right"]) for line in lines}) == 1
        assert len({round(line["left"]) for line in lines}) > 1
        words = first.evaluate("each => each.firstChild.data.trim().split(/\\s+/).slice(0, 2)")
        before, after = first.evaluate(_PIECES, words)
        assert before > after
        contents = page.locator(".md-sidebar--secondary").bounding_box()
        text = page.locator(".md-content").bounding_box()
        assert contents is not None
        assert text is not None
        assert contents["x"] < text["x"]  # what is on the right elsewhere is on the left
        column = page.locator(".md-typeset table").last.locator("th")
        assert column.first.bounding_box()["x"] > column.last.bounding_box()["x"]  # type: ignore[index]


def test_english_pages_in_an_arabic_frame_fit_a_phone(browser: Browser, site: str) -> None:
    with visit(browser, f"{site}ar/index.html", width=360, height=740) as seen:
        for name in ("index", "tutorial", "arguments", "guides/from-hf", "guides/resume"):
            seen.page.goto(f"{site}ar/{name}.html")
            assert seen.page.locator('[lang="en"][dir="ltr"] li').count() > 0
            assert not scrolls_sideways(seen.page), name
        screenshot(seen.page, "docs-resume-ar-phone", whole=False)


def test_no_table_is_wider_than_its_frame_on_a_screen(browser: Browser, site: str) -> None:
    wide, num_tables = {}, 0
    with visit(browser, f"{site}index.html") as seen:
        page = seen.page
        pages = page.locator(".md-nav--primary a.md-nav__link").evaluate_all(
            "all => [...new Set(all.map((each) => each.href.split('#')[0]))]"
        )
        assert len(pages) > 30
        # Nothing here is searched for, and the search reads its whole index on each page.
        page.route("**/search/**", lambda route: route.abort())
        for address in filter(has_table, pages):
            page.set_viewport_size({"width": 1280, "height": 900})
            page.goto(address)
            tables = page.locator(".md-typeset table:not([class])").count()
            assert page.locator(".md-typeset__scrollwrap").count() == tables
            num_tables += tables
            for width in (1280, 1920):
                page.set_viewport_size({"width": width, "height": 900})
                if found := page.evaluate(_WIDE):
                    wide[address, width] = found
            if address.endswith("/arguments.html"):
                screenshot(page, "docs-arguments", whole=False)
    assert num_tables > 30
    assert wide == {}


def test_an_argument_is_a_card_on_a_phone(browser: Browser, site: str) -> None:
    with visit(browser, f"{site}arguments.html", width=390, height=740) as seen:
        assert not scrolls_sideways(seen.page)
        assert seen.page.evaluate(_WIDE) == []
        screenshot(seen.page, "docs-arguments-phone", whole=False)


def test_pages_find_all_that_they_ask_for(browser: Browser, site: str) -> None:
    with visit(browser, f"{site}index.html") as seen:
        missing: list[str] = []
        seen.page.on("response", lambda answer: answer.status == 404 and missing.append(answer.url))
        for name in ("index.html", "ko/index.html", "ar/guides/resume.html", "zh/testing.html"):
            seen.page.goto(f"{site}{name}")
            seen.page.wait_for_load_state("networkidle")
        assert any(address.endswith("zh/sitemap.xml") for address in seen.requests)
        assert missing == []


@pytest.mark.parametrize("name", GUIDES)
def test_code_on_an_arabic_page_runs_from_left_to_right(
    browser: Browser, site: str, name: str
) -> None:
    with visit(browser, guide(site, "ar", name)) as seen:
        page = seen.page
        styles = page.locator(".md-typeset :is(pre, code)").evaluate_all(
            "all => all.map((each) => getComputedStyle(each).direction)"
        )
        assert set(styles) == {"ltr"}
        blocks = page.locator(".md-typeset pre > code")
        for index in range(blocks.count()):
            block = blocks.nth(index)
            lines = block.evaluate(_LINES)
            edge = block.evaluate("each => each.getBoundingClientRect().left")
            # A line is one or a few levels in from the left edge, never drawn from the right.
            assert min(line["left"] for line in lines) - edge < 40
        quoted = page.locator(".md-typeset code", has_text=re.compile('"$')).first
        told = quoted.inner_text()
        start, end = quoted.evaluate(_PIECES, [told[:2], told[-2:]])
        assert start < end  # the last quote is drawn where it is read, behind the word


def test_the_languages_of_a_page_lead_to_each_other(browser: Browser, site: str) -> None:
    with visit(browser, guide(site, "en", "tpu-notebook")) as seen:
        page = seen.page
        for language, direction in (("ar", "rtl"), ("ko", "ltr"), ("zh", "ltr"), ("en", "ltr")):
            page.locator(".md-header .md-select > button").hover()
            page.locator(f'.md-select__link[hreflang="{language}"]').click()
            page.wait_for_url(guide(site, language, "tpu-notebook"))
            assert page.evaluate("document.documentElement.lang") == language
            assert page.evaluate("getComputedStyle(document.body).direction") == direction
        assert_harmless(seen, site)
