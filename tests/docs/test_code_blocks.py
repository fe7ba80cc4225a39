"""Every code block of the README and the docs runs.

A python block that starts with `# name.py` is saved under that name, and run as a script unless a
`python name.py` line of the page does so; the others run one after another, as a page is read. In
bash blocks, `anytrain` and `python` lines run in the folder of those scripts, and one whose comment
says Ctrl-C is interrupted once it trains: such a run takes long, and goes on for a few steps only
(`shortened.py` starts it, the page's text is as it is). `make` lines are checked for their target,
and a line that starts with another program has to be on the list of those that are not run.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

import anytrain
from launching import child_environment, run_command

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# A translated page (page.ko.md) has the English one's blocks: test_translations.py sees to it.
IN_ENGLISH = [page for page in PAGES if len(page.suffixes) == 1]
NOT_RUN = {"pip", "git", "cd", "pre-commit", "torchrun", "srun"}
SHORTENED = Path(__file__).with_name("shortened.py")
_in_process = PythonEvaluator()


def run_python(example: Example) -> None:
    named = re.match(r"# (\w+\.py)\n", example.parsed)
    if named is None:
        _in_process(example)
        return
    Path(named[1]).write_text(example.parsed, encoding="utf-8")
    if not re.search(rf"^python {named[1]}", example.document.text, re.MULTILINE):
        run_command([sys.executable, named[1]], cwd=Path.cwd())


def run_bash(example: Example) -> None:
    stopped = example.namespace.setdefault("interrupted", [])
    for line in example.parsed.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and "Ctrl-C" in line.partition("#")[2]:
            interrupt(words)
            stopped.append(words)
        elif words in stopped:
            run_command([sys.executable, SHORTENED, "20", *words[1:]], cwd=Path.cwd())
        elif words:
            run_line(words)


def interrupt(words: list[str]) -> None:
    """Start a training, press Ctrl-C when it has logged something, and expect it to end well."""
    command, env = [sys.executable, str(SHORTENED), "30000", *words[1:]], child_environment()
    started = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        while not any(file.stat().st_size for file in Path.cwd().glob("runs/*/metrics.jsonl")):
            assert started.poll() is None, "it ended before anybody could stop it"
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=240)
    finally:
        started.kill()
    assert started.returncode == 128 + signal.SIGINT
    assert "anytrain: saved runs/" in said


def run_line(words: list[str]) -> None:
    if words[0] == "make":
        run_command(["make", "--dry-run", *words[1:]], cwd=ROOT)
    elif words[0] in ("anytrain", "python"):
        path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        module = ["-m", "anytrain"] if words[0] == "anytrain" else []
        run_command([sys.executable, *module, *words[1:]], cwd=Path.cwd(), env=path)
    else:
        assert words[0] in NOT_RUN, f"nobody checks this line: {shlex.join(words)}"


@pytest.mark.parametrize("page", IN_ENGLISH, ids=[str(p.relative_to(ROOT)) for p in IN_ENGLISH])
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parsers = [CodeBlockParser("python", run_python), CodeBlockParser("bash", run_bash)]
    document = Sybil(parsers=[*parsers, SkipParser()]).parse(page)
    document.namespace["__name__"] = "__page__"
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_a_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


DOORS = {
    "TrainingArguments": {field.name for field in dataclasses.fields(anytrain.TrainingArguments)},
    "ProjectConfiguration": set(inspect.signature(anytrain.ProjectConfiguration).parameters),
    "Accelerator": set(inspect.signature(anytrain.Accelerator).parameters),
}


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_an_argument_that_a_sentence_names_is_there(page: Path) -> None:
    pattern = rf"`((?:{'|'.join(DOORS)})\([^`]*\))`"
    for text in re.findall(pattern, page.read_text(encoding="utf-8")):
        call = ast.parse(text.replace("\n", " "), mode="eval").body
        assert isinstance(call, ast.Call)
        for given in call.keywords:
            assert given.arg in DOORS[text.partition("(")[0]], text


def test_a_program_that_nobody_runs_is_noticed() -> None:
    with pytest.raises(AssertionError, match="nobody checks"):
        run_line(["curl", "somewhere"])
