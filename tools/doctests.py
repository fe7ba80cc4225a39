"""Let the site show the examples of docstrings as code; Markdown takes `>>>` for a quotation.

And let a method be shown that a sibling class merely names, so that types can be checked.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*\n).+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Put each example of a docstring between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of whatever was found."""
        if obj.docstring is not None:
            told = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = told

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Leave out what a class says of a method that another one of its kin has."""
        for name, member in list(cls.members.items()):
            is_named = member.is_attribute and member.value is None and not member.docstring
            if is_named and str(member.annotation).startswith("Callable"):
                del cls.members[name]
