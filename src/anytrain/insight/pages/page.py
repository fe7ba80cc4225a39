"""One self-contained HTML page: everything escaped, light and dark, readable on a phone.

Text becomes HTML in one place, `tag`: what is not `Markup` is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable


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
    return Markup("".join(_escaped(part) for each in content for part in _parts(each)))


def table(head: Iterable[str], rows: Iterable[Iterable[Content]]) -> Markup:
    """Return a table that scrolls by itself where the screen is narrow."""
    top = tag("tr", (tag("th", cell) for cell in head))
    body = [tag("tr", (tag("td", cell) for cell in row)) for row in rows]
    inner = tag("table", tag("thead", top), tag("tbody", body))
    return tag("div", inner, class_="wide")


def document(title: str, *content: Content) -> str:
    """Return a whole page."""
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{tag("title", title)}'
        f"<style>{STYLE}</style></head><body>{tag('main', *content)}</body></html>\n"
    )


def _parts(content: Content) -> Iterable[str]:
    return (content,) if isinstance(content, str) else content


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text, quote=True)


STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c1f24;--dim:#5c6470;--line:#d8dce2;
--soft:#f5f6f8;--error:#b3261e;--warning:#8a5a00;--note:#0b5cad;--good:#1a7f37;--accent:#0b5cad}
@media(prefers-color-scheme:dark){:root{--back:#15171a;--text:#e6e8eb;--dim:#9aa3ad;
--line:#343a42;--soft:#1e2126;--error:#ff8a80;--warning:#f0b957;--note:#7db8f5;--good:#6fcf87;
--accent:#7db8f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.25rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:1.5rem 0 .5rem}
p{margin:.4rem 0;overflow-wrap:anywhere}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.dim{color:var(--dim)}.good{color:var(--good)}.bad,.error{color:var(--error)}
.warning{color:var(--warning)}.note{color:var(--note)}
.finding{border:1px solid var(--line);border-left-width:.3rem;border-radius:.3rem;
padding:.6rem .8rem;margin:.8rem 0}
.finding.error{border-left-color:var(--error);color:inherit}
.finding.warning{border-left-color:var(--warning);color:inherit}
.finding.note{border-left-color:var(--note);color:inherit}
.badge{font-weight:600;text-transform:uppercase;font-size:.75rem;letter-spacing:.04em}
pre{background:var(--soft);border-radius:.3rem;padding:.5rem;margin:.5rem 0;overflow-x:auto}
pre .here{background:color-mix(in srgb,var(--warning) 25%,transparent);display:block}
pre .line{display:block}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:600}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--dim);font:11px system-ui,sans-serif}
"""
