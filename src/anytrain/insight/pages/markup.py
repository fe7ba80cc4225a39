"""One self-contained HTML page: everything escaped, light and dark, readable on a phone.

Text becomes HTML in one place, `tag`: what is not `Markup` is escaped. A page may run only the
scripts and use only the styles that `document` was given: its policy names them by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from anytrain._version import __version__
from anytrain.core.documents import finite


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Iterable[str]


def tag(name: str, *content: Content, **attributes: str) -> Markup:
    """Return an element; text in it is escaped, `class_` and the like lose their underscore.

    >>> tag("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value, quote=True)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{told}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    """Return the parts one after the other; text is escaped."""
    parts = (part for each in content for part in ((each,) if isinstance(each, str) else each))
    return Markup(
        "".join(p if isinstance(p, Markup) else html.escape(p, quote=True) for p in parts)
    )


def table(
    head: Iterable[str],
    rows: Iterable[Iterable[Content]],
    *,
    caption: Content = "",
    numbers: Collection[int] = (),
) -> Markup:
    """Return a table that scrolls by itself where the screen is narrow.

    The first cell names its row; the columns in `numbers` are aligned to the right.
    """

    def kind(column: int) -> dict[str, str]:
        return {"class_": "number"} if column in numbers else {}

    top = (tag("th", cell, scope="col", **kind(n)) for n, cell in enumerate(head))
    body = [
        tag(
            "tr",
            (
                tag("td", cell, **kind(n)) if n else tag("th", cell, scope="row", **kind(n))
                for n, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    above = (tag("caption", caption),) if caption else ()
    inner = tag("table", *above, tag("thead", tag("tr", top)), tag("tbody", body))
    return tag("div", inner, class_="wide")


def embedded(data: Any, name: str) -> Markup:
    """Return data as JSON in the page, which its scripts find by name; nothing in it can run.

    NaN and infinities are refused: JSON has no such numbers.
    """
    # What is not ASCII, U+2028 among it, is written as an escape already.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(
        f'<script type="application/json" id="{html.escape(name, quote=True)}">{text}</script>'
    )


def document(
    title: str,
    *content: Content,
    before: Content = (),
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    connects: bool = False,
) -> str:
    """Return a whole page; what comes `before` stands above its main part.

    `styles` and `scripts` are texts of our own or of a library, never of a run. With `connects`
    the page may ask the server that it came from.
    """
    styles = [_plain(each) for each in (beside("page.css"), *styles)]
    scripts = [_plain(each) for each in scripts]
    policy = [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        f"style-src {' '.join(map(_hash, styles))}",
    ]
    if scripts:
        policy.append(f"script-src {' '.join(map(_hash, scripts))}")
    if connects:
        policy.append("connect-src 'self'")
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">'
    )
    look = "".join(f"<style>{each}</style>" for each in styles)
    run = "".join(f"<script>{each}</script>\n" for each in scripts)
    return encodable(
        f'<!doctype html>\n<html lang="en"><head>{head}{tag("title", title)}{look}</head>'
        f"<body>\n{joined(before)}{tag('main', *content, id='main')}\n{run}"
        "</body></html>\n"
    )


def encodable(text: str) -> str:
    """Return text that every file can hold: half a character becomes its number.

    Names of files have such halves where they are no UTF-8, and JSON may hold them.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def beside(name: str) -> str:
    """Return a style or a script that lies beside this module."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _plain(text: str) -> str:
    """Return it with the line ends that a browser will hash."""
    assert "</script" not in text.lower()
    assert "</style" not in text.lower()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@dataclass(frozen=True, slots=True)
class Section:
    """Something that the report tells about."""

    name: str
    """What links lead to."""
    title: str
    content: Markup


def framed(
    sections: Iterable[Section | None], heading: Markup, folder: object
) -> tuple[Markup, Markup]:
    """Return a report's sections with what stands below them, and what stands above them.

    Above are the heading, a link past it, and links to the sections; below, whose record it is.
    """
    known = [each for each in sections if each is not None]
    links = (tag("li", tag("a", each.title, href=f"#{each.name}")) for each in known)
    above = joined(
        tag("a", "Skip to the report", href="#main", class_="skip"),
        tag("header", heading, tag("nav", tag("ul", links), aria_label="Contents")),
    )
    made = f"Made by anytrain {__version__} from the record in {folder}."
    return joined(map(_drawn, known), tag("footer", tag("p", made, class_="dim"))), above


def _drawn(each: Section) -> Markup:
    title = f"{each.name}-title"
    heading = tag("h2", each.title, id=title)
    return tag("section", heading, each.content, id=each.name, aria_labelledby=title)


def section(name: str, title: str, content: Iterable[Content]) -> Section | None:
    """Return a section; None where there is nothing to say."""
    found = joined(*content)
    return Section(name, title, found) if found else None


def facts(values: Mapping[str, Any], caption: str) -> Markup:
    """Return names and values as a table of two columns; what has no value is left out."""
    known = {name: value for name, value in values.items() if value is not None}
    rows = [(name, tag("code", text(value))) for name, value in known.items()]
    if not rows:
        return Markup("")
    return tag("div", table(("name", "value"), rows, caption=caption), class_="facts")


def text(value: Any, longest: int = 300) -> str:
    """Return any value as text, cut where it is very long."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return found if len(found) <= longest else f"{found[:longest]}…"


def moment(seconds: Any) -> str:
    """Return a time since 1970 as date and time here; nothing where there is none."""
    found = finite(seconds)
    try:
        # With its zone: a report is read elsewhere, too.
        return "" if found is None else time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(found))
    except (ValueError, OverflowError, OSError):
        return ""
