"""Keep a user's files as they are, while the script that would change them is traced.

What is opened for writing is a throwaway file in the trace's own folder, what is removed only
seems to be gone, and folders that were made are removed again. The script reads back what it has
written. Caches are written for real: what was downloaded serves the run, too. What libraries open
below Python (databases, columns of Arrow) is not seen here.

Other programs are held back, as what they do to files is not seen: one that only looks is run, and
so is a compiler, which writes to temporary folders. Any other seems to end well and to say nothing.
"""

from __future__ import annotations

import builtins
import functools
import io
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DEVICES = ("/dev", "/proc", "/sys")
_CACHES = (
    *(("huggingface_hub.constants", name) for name in ("HF_HOME", "HF_HUB_CACHE")),
    *(("datasets.config", name) for name in ("HF_CACHE_HOME", "HF_DATASETS_CACHE")),
)
"""Module constants in which libraries keep the paths of their caches."""
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


class Sandbox:
    """The throwaway files that stand in for the user's own, and what only seems removed."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        self._instead: dict[str, str] = {}
        self._gone: set[str] = set()
        self._made: list[str] = []
        self._numbers = itertools.count()
        self._is_over = False
        self._stat, self._mkdir, self._rmdir = os.stat, os.mkdir, os.rmdir

    def is_users(self, path: Any) -> bool:
        if isinstance(path, int) or self._is_over:
            return False
        full = _full(path)
        free = (self._folder, *_DEVICES, *_caches())
        return not any(full == place or full.startswith(f"{place}/") for place in free)

    def read(self, path: Any) -> Any:
        """Return what to read in the place of a file; fail where it seems to be gone."""
        full = None if isinstance(path, int) or self._is_over else _full(path)
        if full in self._instead:
            return self._instead[full]
        if full is not None and any(
            str(p) in self._gone for p in (Path(full), *Path(full).parents)
        ):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))
        return path

    def written(self, path: Any, *, keeps: bool) -> Any:
        """Return what to write in the place of a file, with its old content where that stays."""
        if not self.is_users(path):
            return path
        full = _full(path)
        if full not in self._instead:
            self._stat(os.path.dirname(full))  # a folder that is not there is an error
            if os.path.isdir(full):
                raise IsADirectoryError(21, os.strerror(21), os.fspath(path))
            name = f"{next(self._numbers)}-{os.path.basename(full)}"
            stands = os.path.join(self._folder, f".instead-{name}")
            if keeps and full not in self._gone and os.path.exists(full):
                shutil.copyfile(full, stands)
            self._instead[full] = stands
        self._gone.discard(full)
        return self._instead[full]

    def remove(self, path: Any) -> None:
        """Let a path seem to be removed."""
        os.lstat(path)
        full = _full(path)
        self._gone.add(full)
        for known in [k for k in self._instead if k == full or k.startswith(f"{full}/")]:
            del self._instead[known]

    def rename(self, source: Any, to: Any) -> None:
        """Let a file seem to be another one."""
        if not os.path.isdir(source):
            shutil.copyfile(self.read(source), self.written(to, keeps=False))
        (self.remove if self.is_users(source) else os.remove)(source)

    def make(self, path: Any, mode: int = 0o777) -> None:
        """Make a folder, until the end of the trace."""
        full = _full(path)
        if full in self._gone and os.path.isdir(os.path.dirname(full)):
            self._gone.discard(full)
            return
        self._mkdir(path, mode)
        self._made.append(full)

    def tidy(self) -> None:
        """Remove the folders that were made, and leave the files to whoever comes."""
        self._is_over = True
        for path in reversed(self._made):
            try:
                self._rmdir(path)
            except OSError:  # somebody needs it
                continue


@contextmanager
def sandboxed(folder: str) -> Iterator[Sandbox]:
    """Let the block write into a folder alone; everything else stays as it is."""
    own = Sandbox(folder)
    opened = functools.partial(_open, own, builtins.open)
    changed: list[tuple[Any, str, Any]] = [
        (builtins, "open", opened),
        (io, "open", opened),
        (os, "open", functools.partial(_os_open, own, os.open)),
        (tempfile, "tempdir", folder),
        (os, "mkdir", _unless(own, os.mkdir, own.make)),
    ]
    for holder, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
        changed.append((holder, name, _unless(own, getattr(holder, name), own.remove)))
    for name in ("rename", "replace"):
        changed.append((os, name, _unless(own, getattr(os, name), own.rename)))
    for name in ("stat", "lstat"):
        changed.append((os, name, _reading(own, getattr(os, name))))
    for name in ("chmod", "utime", "truncate", "link", "symlink"):
        changed.append((os, name, _unless(own, getattr(os, name), lambda *args: None)))
    with ExitStack() as stack:
        stack.callback(own.tidy)
        for holder, name, change in changed:
            stack.enter_context(mock.patch.object(holder, name, change))
        yield own


def _open(
    own: Sandbox, really: Callable[..., Any], file: Any, mode: str = "r", *a: Any, **k: Any
) -> Any:
    if isinstance(file, int) or not isinstance(mode, str):
        return really(file, mode, *a, **k)
    if not set(mode) & set("wax+"):
        return really(own.read(file), mode, *a, **k)
    if "x" in mode and os.path.exists(file):
        raise FileExistsError(17, os.strerror(17), os.fspath(file))
    if "r" in mode:
        os.stat(file)
    return really(
        own.written(file, keeps="a" in mode or "r" in mode), mode.replace("x", "w"), *a, **k
    )


def _os_open(
    own: Sandbox, really: Callable[..., int], path: Any, flags: int, *a: Any, **k: Any
) -> int:
    if k.get("dir_fd") is not None:
        return really(path, flags, *a, **k)
    if not flags & _WRITES:
        return really(own.read(path), flags, *a, **k)
    if flags & os.O_EXCL and os.path.exists(path):
        raise FileExistsError(17, os.strerror(17), os.fspath(path))
    if not flags & os.O_CREAT:
        os.stat(path)
    stands = own.written(path, keeps=not flags & os.O_TRUNC)
    return really(stands, flags | os.O_CREAT, *a, **k)


def _unless(
    own: Sandbox, really: Callable[..., Any], instead: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what leaves the user's files alone, and is itself for all others."""

    @functools.wraps(really)
    def done(path: Any, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            return really(path, *args, **kwargs)
        paths = (path, *(arg for arg in args if isinstance(arg, (str, bytes, os.PathLike))))
        if not any(map(own.is_users, paths)):
            return really(path, *args, **kwargs)
        return instead(*paths)

    return done


def _reading(own: Sandbox, really: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(really)
    def done(path: Any, *args: Any, **kwargs: Any) -> Any:
        is_plain = kwargs.get("dir_fd") is None
        return really(own.read(path) if is_plain else path, *args, **kwargs)

    return done


def _full(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def _caches() -> Iterator[str]:
    yield os.path.expanduser("~/.cache")
    for module, name in _CACHES:
        found = getattr(sys.modules.get(module), name, None)
        if found:
            yield os.path.abspath(found)


# -- other programs -------------------------------------------------------------------------------


@contextmanager
def without_other_programs(tell: Told) -> Iterator[None]:
    """Run no program in the block that may change files; report each that was not run."""
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
