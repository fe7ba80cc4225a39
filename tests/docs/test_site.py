"""The site builds without a warning, needs no network, and shows every command."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import anytrain
from anytrain.cli import main
from launching import run_command

pytest.importorskip("mkdocs_static_i18n")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
LANGUAGES = ("ar", "ko", "zh")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning ends the build."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    ran = run_command(words, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    assert ran.stdout + ran.stderr == ""
    return folder


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//""")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []


def test_a_link_between_pages_leads_somewhere(site: Path) -> None:
    missing = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # its links are those of a site at the root of a host
        for target in re.findall(r'<a [^>]*href="([^"#:]+)[^"]*"', page.read_text("utf-8")):
            if not (page.parent / target).exists():
                missing.append((page.relative_to(site), target))
    assert missing == []


def test_every_command_is_there_with_its_options(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in main._COMMANDS:
        assert f'id="anytrain-{name}"' in page
    assert "--kills" in page
    assert "--max_seq_length" in page
    assert "anytrain checkpoint prune" in page


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = "".join(page.read_text("utf-8") for page in (site / "reference").glob("*.html"))
    missing = [
        name
        for name in anytrain.__all__
        if name != "__version__" and not re.search(rf'id="anytrain\.[\w.]+\.{name}"', pages)
    ]
    assert missing == []
    assert "<blockquote>" not in pages  # an example in a docstring that was taken for a quotation


def test_the_search_knows_pages_once_and_works_from_a_disk(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {")
    assert '"location":"reference/trainer.html#' in index
    assert not re.search(r'"location":"(?:ar|ko|zh)/(?:reference|decisions)/', index)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_page_without_a_translation_is_shown_in_english(site: Path, language: str) -> None:
    page = (site / language / "tutorial.html").read_text(encoding="utf-8")
    assert '<div lang="en" dir="ltr"><h1' in page


def test_arabic_is_written_from_right_to_left(site: Path) -> None:
    assert '<body dir="rtl"' in (site / "ar" / "index.html").read_text(encoding="utf-8")
