"""Let the site show the examples of docstrings as code; Markdown takes `>>>` for a quotation."""

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
