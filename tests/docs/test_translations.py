"""A translated page says what the English one says: same code, same parts, same names and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LANGUAGES = {"ar": "\u0600-\u06ff", "ko": "\uac00-\ud7a3", "zh": "\u4e00-\u9fff"}
PAGES = sorted(page for language in LANGUAGES for page in (ROOT / "docs").rglob(f"*.{language}.md"))
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def both(page: Path) -> tuple[str, str]:
    """Return the English text and the translated one."""
    english = page.with_name(page.name.replace("".join(page.suffixes[-2:]), ".md"))
    return english.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")


def prose(text: str) -> str:
    return _BLOCK.sub("", text)


by_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


def test_both_device_guides_are_there_in_every_language() -> None:
    wanted = {
        f"{name}.{language}.md"
        for name in ("apple-silicon", "tpu-notebook")
        for language in LANGUAGES
    }
    assert wanted <= {page.name for page in PAGES}


@by_page
def test_code_blocks_are_those_of_the_english_page(page: Path) -> None:
    english, translated = map(_BLOCK.findall, both(page))
    assert english
    assert translated == english


@by_page
@pytest.mark.parametrize("part", [r"^#+ ", r"^\|", r"^ *- ", r"^!!! \w+", r"\n\n(?=\S)"], ids=repr)
def test_headings_tables_lists_and_paragraphs_correspond(page: Path, part: str) -> None:
    english, translated = (re.findall(part, prose(text), re.MULTILINE) for text in both(page))
    assert translated == english


@by_page
def test_names_in_code_and_links_are_kept(page: Path) -> None:
    for what in (r"(?<!`)`([^`\n]+)`(?!`)", r"\]\(([^)]+)\)"):
        english, translated = (Counter(re.findall(what, prose(text))) for text in both(page))
        assert translated == english


@by_page
def test_every_heading_and_sentence_is_translated(page: Path) -> None:
    letters = LANGUAGES[page.suffixes[-2].lstrip(".")]
    _, text = both(page)
    names = ("# bfloat16", "## bfloat16", "### bfloat16")
    paragraphs = [each for each in re.split(r"\n\n+", prose(text)) if each.strip()]
    left = [each for each in paragraphs if not re.search(f"[{letters}]", each)]
    assert [each for each in left if each.strip() not in names] == []
