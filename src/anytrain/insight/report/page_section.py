"""A section of the report: a heading that can be linked to, and what stands under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anytrain.insight.pages.page import Content, Markup, joined, table, tag
from anytrain.insight.report.page_values import text


@dataclass(frozen=True, slots=True)
class Section:
    """Something that the report tells about."""

    name: str
    """What links lead to."""
    title: str
    content: Markup

    def __str__(self) -> str:
        heading = tag("h2", self.title, id=f"{self.name}-title")
        return tag(
            "section", heading, self.content, id=self.name, aria_labelledby=f"{self.name}-title"
        )


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
