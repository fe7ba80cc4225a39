"""Files and functions stay small: counted in code lines, without docstrings and blanks."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "anytrain"
FILE_BUDGET = 400
FUNCTION_BUDGET = 50
# Of the whole tree: both may only fall while features stay. The goal is 400 and 64,000.
MOST_FILES, MOST_LINES = 417, 82_600
# path, or path::function -> (lines allowed, "date: why"). Keep it short.
ALLOWED: dict[str, tuple[int, str]] = {}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FORBIDDEN_NAMES = ("utils", "util", "helpers", "helper", "common", "misc", "manager", "handler")


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(ast.parse(source))


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that hold docstrings, attributes' too, and bare `...`."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def sizes() -> dict[str, tuple[int, int]]:
    """Return (lines, budget) of every file and function, by name."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(SRC.rglob("*.py")):
        name, source = str(path.relative_to(SRC)), path.read_text(encoding="utf-8")
        lines = code_lines(source)
        found[name] = (len(lines), FILE_BUDGET)
        for function in functions(ast.parse(source)):
            # The signature of a front door is its documentation: only the body is counted.
            body = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
            found[f"{name}::{function.name}"] = (len(lines & set(body)), FUNCTION_BUDGET)
    return found


def test_a_line_is_counted_when_it_holds_code() -> None:
    source = (
        '"""Doc."""\n\n# why\nx = 1\ndef f():\n    """Doc\n    more."""\n    return """a\nb"""\n'
    )
    assert code_lines(source) == {4, 5, 8, 9}


def test_files_and_functions_keep_their_budget() -> None:
    over = {
        name: f"{lines} of {ALLOWED.get(name, (budget, ''))[0]} lines"
        for name, (lines, budget) in sizes().items()
        if lines > ALLOWED.get(name, (budget, ""))[0]
    }
    assert not over, "split these, or write a dated reason into ALLOWED"


def test_the_tree_keeps_its_budget() -> None:
    files = list(SRC.rglob("*.py"))
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert len(files) <= MOST_FILES, "a file earns its place when somebody would look for it"
    assert lines <= MOST_LINES, "delete what does not pay before something is added"


def test_the_allow_list_holds_nothing_that_has_become_small() -> None:
    now = sizes()
    stale = [n for n in ALLOWED if n not in now or now[n][0] <= now[n][1]]
    assert not stale


def test_a_file_is_named_for_what_it_holds() -> None:
    vague = [str(p) for p in SRC.rglob("*.py") if p.stem.strip("_") in FORBIDDEN_NAMES]
    assert not vague
