"""The site builds without a warning, needs no network, and shows every command."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anytrain
from anytrain.cli import main
from anytrain.cli.launch import launch
from anytrain.doors.accelerator import options
from launching import run_command

pytest.importorskip("mkdocs_static_i18n")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
LANGUAGES = ("ar", "ko", "zh")
EXPLAINED = {
    "trainer": (anytrain.Trainer, anytrain.Seq2SeqTrainer),
    # Its constructor's arguments have a page of their own: arguments.md.
    "training-arguments": (anytrain.TrainingArguments,),
    "accelerator": (
        anytrain.Accelerator,
        anytrain.DataLoaderConfiguration,
        anytrain.ProjectConfiguration,
        anytrain.GradientAccumulationPlugin,
        options.TorchDynamoPlugin,
        *(kind for kind in options.HANDLERS if kind is not options.ProfileKwargs),
    ),
    "launching": (anytrain.notebook_launcher, anytrain.debug_launcher),
    "reading": (anytrain.report, anytrain.why),
}


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


def parameters(thing: Any) -> list[str]:
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def public(thing: Any) -> Iterator[tuple[str, list[str]]]:
    """Give what has an entry of its own in the reference, by its address, with its parameters."""
    where = f"{thing.__module__}.{thing.__qualname__}"
    if thing is not anytrain.TrainingArguments:
        yield where, parameters(thing)
    for name in dir(thing) if inspect.isclass(thing) else ():
        method = inspect.getattr_static(thing, name)
        method = getattr(method, "__func__", method)
        is_method = inspect.isfunction(method) and method.__name__ == name and name[0] != "_"
        is_ours = is_method and method.__module__.startswith("anytrain.doors")
        is_shown = thing.__base__ is not anytrain.Trainer or name in vars(thing)
        if is_ours and is_shown and parameters(method):
            yield f"{where}.{name}", parameters(method)


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_parameter_is_explained_on_its_reference_page(site: Path, name: str) -> None:
    page = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
    entries = re.split(r'<h\d id="([^"]+)"', page)
    told = dict(zip(entries[1::2], entries[2::2], strict=True))
    missing = []
    for thing in EXPLAINED[name]:
        for where, names in public(thing):
            known = re.findall(r"<b><code>\**(\w+)</code></b>", told[where])
            missing += [f"{where}: {each}" for each in names if each not in known]
    assert missing == []
    source = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert "\n```python\n" in source  # an example, which test_code_blocks runs


def test_every_argument_and_every_option_of_launch_is_explained(site: Path) -> None:
    page = (site / "arguments.html").read_text(encoding="utf-8").replace("<wbr>", "")
    rows = re.findall(r"<td><code>(\w+)</code></td>(?:\s*<td>.*</td>){2}\s*<td>.+</td>", page)
    assert set(rows) >= set(parameters(anytrain.Seq2SeqTrainingArguments))
    page = (site / "reference" / "launching.html").read_text("utf-8").replace("<wbr>", "")
    options = re.findall(r"<td><code>([^<]+)</code></td>\s*<td>[^<]", page)
    told = {name for row in options for name in re.findall(r"--([\w-]+)", row)}
    assert {name for name in parameters(launch) if name not in ("script", "args")} <= told


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
