"""Write docs/arguments.md from the arguments and the table of what each does.

python tools/arguments.py            write the page
python tools/arguments.py --check    say whether it is up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from anytrain.doors.training_args import Seq2SeqTrainingArguments, TrainingArguments, convert
from anytrain.doors.training_args.legacy import RULES, Rule
from anytrain.doors.training_args.support import DIFFERENCES, SEQ2SEQ, Support, table

PAGE = Path(__file__).parents[1] / "docs" / "arguments.md"
WORDS = {"works": "works", "replaced": "replaced", "no_effect": "no effect", "refused": "refused"}
INTRO = """\
# Arguments

Every argument of `TrainingArguments`, by the names of transformers 5.22, and the names of 4.x that
are still pasted. They mean the same as keyword arguments, on a command line, and in YAML and JSON
files; text is converted to the type that an argument has, or refused by name.

- **works**: it does what is said of it.
- **replaced**: it is taken for what replaced it, and one line says so.
- **no effect**: it is accepted, and one line says why it changes nothing.
- **refused**: a value other than the default is refused at once, with why and what to do instead.

This page is made by `tools/arguments.py` from the code.
"""


def page() -> str:
    """Return the whole page."""
    answers = table()
    own = {f.name: f for f in fields(TrainingArguments)}
    now = [own[name] for name in answers if name not in RULES]
    old = [own[name] for name in RULES]
    more = [f for f in fields(Seq2SeqTrainingArguments) if f.name in SEQ2SEQ]
    parts = [
        INTRO,
        "## TrainingArguments\n",
        *rows(now, answers),
        "\n## Seq2SeqTrainingArguments\n",
        *rows(more, SEQ2SEQ),
        "\n## Names of transformers 4.x\n",
        *rows(old, answers),
        "\n## Defaults that differ from transformers 5.22\n",
        *(f"- `{name}`: {reason}" for name, reason in DIFFERENCES.items()),
    ]
    return "\n".join(parts) + "\n"


def rows(listed: Iterable[Field[Any]], answers: dict[str, Support]) -> Iterator[str]:
    """Give the lines of one table."""
    hints: dict[str, Any] = convert.hints(Seq2SeqTrainingArguments)
    yield "| name | type, default | here | note |"
    yield "|---|---|---|---|"
    for field in listed:
        support = answers[field.name]
        kind = ", ".join(filter(None, (spelled(hints[field.name]), default(field))))
        note = told(field, support)
        yield f"| `{field.name}` | {kind} | {WORDS[support.kind]} | {note} |"


def spelled(hint: Any) -> str:
    """Return a type as people say it."""
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    for word in ("anytrain.doors.training_args.fields.", "pathlib.", "typing."):
        text = text.replace(word, "")
    return text.replace(" | None", "").replace("None | ", "").replace(" | ", " or ")


def default(field: Field[Any]) -> str:
    """Return a field's default; nothing where it is unset."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return "" if value is None else f"`{value!r}`"


def told(field: Field[Any], support: Support) -> str:
    """Return what there is to say, as one line of a table."""
    rule = RULES.get(field.name)
    text = "" if rule else field.metadata["help"]
    pieces = [text, support.note, support.fix, accepted(rule) if rule else ""]
    if support.kind == "replaced":
        return f"`{support.note}`" if "=" in support.note else support.note
    return " ".join(sentence(piece) for piece in pieces if piece).replace("|", "\\|")


def sentence(text: str) -> str:
    """Return the text with a capital and a full stop, unless it starts with a name."""
    whole = text if text.endswith((".", "!")) else f"{text}."
    return whole if re.match(r"[\w]*[_=`]|anytrain", whole) else whole[0].upper() + whole[1:]


def accepted(rule: Rule) -> str:
    """Return which values of a refused name are no request at all."""
    words = ", ".join(f"`{word!r}`" for word in rule.silent if word not in (False, ""))
    return f"Accepted, since it is so anyway: {words}." if words else ""


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        if not fresh:
            print(f"{PAGE.name} is out of date: run python tools/arguments.py")
        return 0 if fresh else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
