"""Where a run comes from: its command, its code, its libraries, its host.

Secrets are left out as far as they can be told: by the names of what holds them, and by the shapes
of well-known tokens. That is a best effort: a secret by no such name, in no such shape, is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from anytrain._version import __version__
from anytrain.engine.recording.disk import in_text

_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "datasets": "datasets",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "peft": "peft",
    "huggingface_hub": "huggingface_hub",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
    "triton": "triton",
    "torch_xla": "torch_xla",
    "timm": "timm",
    "sentence_transformers": "sentence-transformers",
    "trl": "trl",
    "bitsandbytes": "bitsandbytes",
    "flash_attn": "flash-attn",
    "evaluate": "evaluate",
    "pyarrow": "pyarrow",
    "pandas": "pandas",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""Imported names whose distributions are worth a line, where the run has imported them."""
_SECRETS = re.compile(
    r"token|key|apikey|secrets?|password|passwd|pwd|passphrase|credentials?|auth|authorization"
    r"|bearer|pat|signature|sig|cookie"
)
_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_NAMED = re.compile(r"""([A-Za-z][\w.-]*)(\s?=\s?)("[^"]*"|'[^']*'|[^\s&,;)}\]=]++(?!=[^=\s]))""")
_IN_JSON = re.compile(r"""(["'])([\w.-]+)(\1\s*:\s*)("(?:[^"\\]|\\.)*"|'[^']*'|[^\s,{}[\]"']+)""")
_IN_HEADERS = re.compile(
    r"""(?i)\b((?:proxy-)?authorization|[\w-]*api-key|cookie)\s*:\s*[^"'\n]+"""
)
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|gh[a-z]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}"
    r"|sk-[\w-]{12,}|xox[a-z]-[\w-]{10,}|A[KS]IA[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"
)
_HIDDEN = "***"
_LONGEST_WORD = 2_000
_PATIENCE_S = 2.0


def here() -> dict[str, Any]:
    """Return what is known at once of this process: time, host, command, libraries."""
    return {
        "time": round(time.time(), 3),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": command(),
        "cwd": _folder(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "git": None,
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are in use; none is imported for it."""
    found = {"anytrain": __version__}
    for module, distribution in _PACKAGES.items():
        version = _version(module, distribution) if module in sys.modules else None
        if version is not None:
            found[distribution] = version
    return found


def _version(module: str, distribution: str) -> str | None:
    told = getattr(sys.modules[module], "__version__", None)
    if isinstance(told, str):  # str() of it: torch's is a class of its own
        return str(told)
    try:  # looks through every folder of the path: 3 ms each
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def command() -> list[str]:
    """Return the command that this process was started with, without secrets."""
    words = sys.orig_argv if sys.argv[:1] != ["-c"] else [sys.executable, "-c", "..."]
    if any("multiprocessing" in word for word in words[1:4]):  # what the parent ran is in argv
        words = [sys.executable, *sys.argv]
    return without_secrets(words)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command's words with the values of options that sound secret hidden.

    >>> without_secrets(["run", "--hub_token", "abc", "--api-key=x", "--max_tokens", "5"])
    ['run', '--hub_token', '***', '--api-key=***', '--max_tokens', '5']
    """
    kept: list[str] = []
    hides = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") and is_secret(name)
        if hides and not word.startswith("--"):
            kept.append(_HIDDEN)
        elif is_option and equals:
            kept.append(f"{name}={_HIDDEN}")
        else:
            kept.append(_short(word))
        hides = is_option and not equals
    return kept


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds what nobody should read.

    >>> [is_secret(name) for name in ("hub_token", "apiKey", "num_input_tokens_seen")]
    [True, True, False]
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return spaced.startswith("x-amz-") or any(
        _SECRETS.fullmatch(word) for word in re.split(r"[^a-z0-9]+", spaced)
    )


def scrubbed(text: str) -> str:
    """Return a text without what can be told to be secret in it.

    Passwords and secret parameters of addresses, `name=value` and JSON with secret names, headers,
    tokens of well-known shapes.

    >>> scrubbed("https://me:pass@host/path?token=abc&page=2")
    'https://***@host/path?token=***&page=2'
    >>> scrubbed('wandb.api_key=abc {"hub_token": "abc", "seed": 1}')
    'wandb.api_key=*** {"hub_token": "***", "seed": 1}'
    """
    text = _IN_HEADERS.sub(rf"\1: {_HIDDEN}", _IN_URL.sub(_HIDDEN, text))
    text = _IN_JSON.sub(_without_value, _NAMED.sub(_without_named, text))
    return _TOKENS.sub(_HIDDEN, text)


def _without_named(found: re.Match[str]) -> str:
    name, equals, _ = found.groups()
    return f"{name}{equals}{_HIDDEN}" if is_secret(name) else found[0]


def _without_value(found: re.Match[str]) -> str:
    quote, name, colon, _ = found.groups()
    return f"{quote}{name}{colon}{quote}{_HIDDEN}{quote}" if is_secret(name) else found[0]


def _short(text: str) -> str:
    # A long text is cut before it is looked at: nobody waits for it.
    return scrubbed(text[: 2 * _LONGEST_WORD])[:_LONGEST_WORD]


def settings(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return settings as JSON holds them; those that sound secret are left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = in_text(key)
        if not is_secret(name):
            try:
                found[name] = _setting(value)
            except Exception:  # noqa: BLE001  a value that holds itself, for example
                found[name] = f"<{type(value).__name__}>"
    return found


def _setting(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.number | np.bool_):
        return value.item()
    if isinstance(value, Mapping):
        return settings(value)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return settings(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return settings({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, list | tuple | set | frozenset):
        return [_setting(inner) for inner in value]
    return _short(in_text(getattr(value, "value", value)))


class Git:
    """What git says of the code, asked in a process of its own so that no start waits for it."""

    def __init__(self) -> None:
        self._out: IO[bytes] | None = None
        self._asked: subprocess.Popen[bytes] | None = None

    def ask(self) -> None:
        """Ask; `answer` has it later."""
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - read once git is done
        words = ["git", "--no-optional-locks", "-C", str(_code()), "status"]
        words += ["--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=all"]
        try:
            self._asked = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.DEVNULL
            )
        except OSError:  # there is no git here
            self._forget()

    def answer(self, *, wait: bool = False) -> dict[str, Any] | None:
        """Return commit, branch and whether files differ from it; None without an answer yet.

        It is given once.
        """
        if self._asked is None or self._out is None:
            return None
        try:
            code = self._asked.wait(_PATIENCE_S) if wait else self._asked.poll()
        except subprocess.TimeoutExpired:  # a huge tree on a slow disk
            self._asked.kill()
            code = 1
            with suppress(subprocess.TimeoutExpired):  # a disk that hangs keeps it from dying
                self._asked.wait(_PATIENCE_S)
        if code is None:
            return None
        self._out.seek(0)
        lines = self._out.read().decode(errors="replace").splitlines() if code == 0 else []
        self._forget()
        return _said(lines)

    def _forget(self) -> None:
        if self._out is not None:
            self._out.close()
        self._out = self._asked = None


def _said(lines: list[str]) -> dict[str, Any] | None:
    found = (line[2:].partition(" ") for line in lines if line.startswith("# "))
    about = {name: value for name, _, value in found}
    commit = about.get("branch.oid")
    if commit is None or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return None
    branch = about.get("branch.head")
    return {
        "commit": commit,
        "branch": None if branch == "(detached)" else branch,
        "is_dirty": any(not line.startswith("# ") for line in lines),
    }


def _code() -> Path:
    """Return the folder of the script; of an installed command, the folder it was started in."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    try:
        folder = script.resolve().parent
        is_own = script.is_file() and not folder.is_relative_to(Path(sys.prefix).resolve())
        return folder if is_own else Path.cwd()
    except OSError:
        return Path()


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return None
