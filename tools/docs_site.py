"""What mkdocs asks while it builds the site: commands by their own help, links out of docs/.

The pages are written for readers of the repository, so a link may lead to a file beside docs/. The
site takes such files along as they are, under `files/`, and so needs no other host.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from anytrain.cli import main
from anytrain.recipes.glue.command import help_text

ROOT = Path(__file__).parents[1]
COMMANDS = "<!-- every command, put in when the site is built -->"
LAUNCH = "<!-- the options of anytrain launch, put in when the site is built -->"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
_IN_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]*)</code>")
_BREAKS = re.compile(r"([._(=,/|]|\w(?=[A-Z][a-z]))(?=\w|&quot;|')")
_taken: set[str] = set()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with the commands in their place, and its links made to fit the site."""
    if _stands_in(page.file):
        page.meta["search"] = {"exclude": True}  # it is found once, in English
        if page.file.src_uri.startswith("reference/"):
            return _elsewhere(page.file)
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    if LAUNCH in markdown:
        markdown = markdown.replace(
            LAUNCH, "\n\n".join(_told(main._load("launch"), "anytrain launch"))
        )
    return _LINK.sub(lambda found: _link(found, page.file), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Return a page whose tables break names where they may; untranslated ones as English."""
    html = _IN_CELL.sub(lambda cell: _CODE.sub(_breakable, cell[0]), html)
    if page.file.src_uri == "arguments.md":
        html = f'<div class="arguments">{html}</div>'
    return f'<div lang="en" dir="ltr">{html}</div>' if _stands_in(page.file) else html


def _breakable(code: re.Match[str]) -> str:
    """Return code that may go on in a new line behind a dot, an underscore and the like."""
    parts = _BREAKS.sub(r"\1<wbr>", code[1])
    return f"<code>{parts}</code>"


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the files that pages have linked to, and write the maps that pages ask for."""
    for name in sorted(_taken):
        target = Path(config.site_dir) / "files" / f"{name}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            listing = "\n".join(sorted(each.name for each in (ROOT / name).iterdir()))
            target.write_text(listing + "\n", encoding="utf-8")
        else:
            shutil.copyfile(ROOT / name, target)
    if not config.site_url:
        _write_maps(Path(config.site_dir))


def _write_maps(site: Path) -> None:
    """Write a map into every folder of pages: each page asks for those of its other languages.

    A map holds whole addresses, and this site has none of its own: they are empty.
    """
    for folder in {page.parent for page in site.rglob("*.html")}:
        (folder / "sitemap.xml").write_text(
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9"></urlset>\n',
            encoding="utf-8",
        )
    (site / "sitemap.xml.gz").unlink(missing_ok=True)


def _stands_in(file: Any) -> bool:
    """Whether an English page stands in another language's place."""
    return bool(file.locale != file.locale_alternate_of)


def _elsewhere(file: Any) -> str:
    """Return a page that leads to the English one: the reference is not made four times."""
    title = (ROOT / "docs" / file.src_uri).read_text(encoding="utf-8").partition("\n")[0]
    target = posixpath.relpath(
        file.dest_uri.partition("/")[2], posixpath.dirname(file.dest_uri) or "."
    )
    return f'{title}\n\n<a href="{target}">{target.rpartition("/")[2]}</a>\n'


def _link(found: re.Match[str], file: Any) -> str:
    """Return a link out of docs/ as one into `files/`; any other link as it is."""
    text, target, _ = found.groups()
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(file.src_uri), target))
    if name.startswith("docs/") or not (ROOT / name).exists():
        return found[0]  # mkdocs checks it
    _taken.add(name)
    up = "../" * (len(PurePosixPath(file.dest_uri).parts) - 1)
    return f'<a href="{up}files/{name}.txt">{text}</a>'


def commands() -> str:
    """Return every command of `anytrain` with its arguments and options."""
    parts: list[str] = []
    for name in main._COMMANDS:
        told = _told(main._load(name), f"anytrain {name}")
        parts += [f"## anytrain {name}", *told]
    return "\n\n".join(parts)


def _told(command: Any, name: str) -> list[str]:
    """Return how a command is called, what it does, and what it takes."""
    parts: list[str] = []
    if hasattr(command, "commands"):
        for each, sub in command.commands.items():
            parts += [f"### {name} {each}", *_told(sub, f"{name} {each}")]
        return parts
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts += [f"```text\n{usage}\n```", _prose(command.help or "")]
    rows = [row for each in command.get_params(context) if (row := _row(each, context))]
    if name == "anytrain glue":  # it reads its options by itself
        parts.append(f"```text\n{help_text(name)}```")
    if rows:
        parts.append("| option | what it does |\n|---|---|\n" + "\n".join(rows))
    return parts


def _row(parameter: Any, context: Any) -> str | None:
    """Return a line of the table of options; None for one that is hidden."""
    record = parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return None
    names, told = (re.sub(r"\s+", " ", text).replace("|", "\\|") for text in record)
    return f"| `{names}` | {_prose(told)} |"


def _prose(text: str) -> str:
    """Return text in which nothing is taken for markup."""
    return re.sub(r"([<*\[])", r"\\\1", text.replace("\b", ""))
