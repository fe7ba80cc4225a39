"""Hold back other programs that a traced script starts: what they do to files is not seen here.

A program that only looks is run, and so is a compiler, which writes to temporary folders. Any other
seems to end well and to say nothing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_LOOKS = """
    arch basename cat cut date df dirname du echo false file free getconf grep head hostname id
    ldconfig ldd ls lsb_release lscpu lspci nproc nvidia-smi printenv ps pwd readlink realpath
    rocm-smi rocminfo stat sw_vers system_profiler tail true uname uptime wc which whoami
    c++ cc clang clang++ g++ gcc ld nvcc ptxas
"""
_GIT_LOOKS = "describe diff log ls-files rev-list rev-parse show status version"
_JOINS = frozenset("|&;<>`$(){}\n")
_NOTHING = ["true"]
Told = Callable[[str], None]


@contextmanager
def held_back(tell: Told) -> Iterator[None]:
    """Run no program in the block that may change files; tell of each that was not run."""
    begin, system = subprocess.Popen.__init__, os.system

    def popen(self: Any, args: Any, *given: Any, **options: Any) -> None:
        if not _only_looks(args, is_shell=bool(options.get("shell"))):
            tell(_told(args))
            options.pop("executable", None)
            args, options["shell"] = _NOTHING, False
        begin(self, args, *given, **options)

    def run(command: Any) -> int:
        if _only_looks(command, is_shell=True):
            return system(command)
        tell(_told(command))
        return 0

    with (
        mock.patch.object(subprocess.Popen, "__init__", popen),
        mock.patch.object(os, "system", run),
    ):
        yield


def _only_looks(args: Any, *, is_shell: bool) -> bool:
    """Whether a command is known to change nothing.

    >>> _only_looks(["git", "rev-parse", "HEAD"], is_shell=False)
    True
    >>> _only_looks("ls | xargs rm", is_shell=True), _only_looks("rm -r runs", is_shell=True)
    (False, False)
    """
    words = _words(args, is_shell=is_shell)
    if not words:
        return False
    name = os.path.basename(words[0]).removesuffix(".exe")
    if name == "git":
        return _asked_of_git(words[1:]) in _GIT_LOOKS.split()
    if name.startswith("python"):
        return words[1:] in (["--version"], ["-V"])
    return name in _LOOKS.split()


def _asked_of_git(words: list[str]) -> str:
    """Return the name of git's own command.

    >>> _asked_of_git(["--no-optional-locks", "-C", "here", "status", "--short"])
    'status'
    """
    rest = iter(words)
    for word in rest:
        if word in ("-C", "-c"):
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return ""


def _words(args: Any, *, is_shell: bool) -> list[str]:
    """Return a command's words; none where a shell would do more than start one program."""
    if isinstance(args, (str, bytes, os.PathLike)):
        text = os.fsdecode(args)
        if is_shell and set(text) & _JOINS:
            return []
        try:
            return shlex.split(text) if is_shell else [text]
        except ValueError:
            return []
    return [os.fsdecode(word) for word in args]


def _told(args: Any) -> str:
    text = args if isinstance(args, str) else shlex.join(_words(args, is_shell=False))
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return f"`{short}` was not run: another program could change your files."
