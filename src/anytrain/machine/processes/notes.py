"""Leave a note on how a rank ended, for the launcher that explains it; flags for all ranks.

Each is a small file in the launcher's folder. Without a launcher of ours nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PEER_DIED = "peer-died"
"""A rank died, and the launcher ends the others: there is nothing to save."""
INTERRUPTED = "interrupted"
"""Whoever launched the ranks interrupts them."""
SAVING = "saving"
"""A rank was asked to stop, and saves its work before it does."""


@dataclass(frozen=True, slots=True)
class Note:
    """How a rank said it ended, and its words.

    The kinds are "error", "peer lost", "stall", "interrupt", "exit" and "preempted".
    """

    kind: str
    text: str
    written: float


def words(error: BaseException) -> str:
    """Return an error's class and text, whatever its own way to show itself does.

    >>> words(KeyError("x")), words(KeyboardInterrupt())
    ("KeyError: 'x'", 'KeyboardInterrupt')
    """
    return f"{type(error).__name__}: {text(error)}".removesuffix(": ")


def text(error: BaseException) -> str:
    """Return what an error says of itself; an error in that is said instead."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001  any class may have any trouble with its own text
        return f"(its text cannot be shown: {type(trouble).__name__})"


def asked_by(signum: int) -> str:
    """Return what a person calls the signal that asked for a stop.

    >>> asked_by(signal.SIGINT), asked_by(signal.SIGUSR1)
    ('Ctrl-C (SIGINT)', 'SIGUSR1')
    """
    known = {signal.SIGINT: "Ctrl-C (SIGINT)", signal.SIGHUP: "a closed terminal (SIGHUP)"}
    return known.get(signal.Signals(signum), signal.Signals(signum).name)


def leave(beats: str | None, rank: int, kind: str, text: str) -> None:
    """Write the rank's note, whole or not at all."""
    if beats is None:
        return
    path = _path(beats, rank)
    try:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"kind": kind, "text": text, "at": time.time()}))
        draft.replace(path)
    except OSError:
        return  # the launcher and its folder are gone: nobody will ask


def read(beats: str | Path, rank: int) -> Note | None:
    """Return the rank's note, or None."""
    path = _path(beats, rank)
    try:
        note = json.loads(path.read_text())
        return Note(note["kind"], note["text"], note["at"])
    except (OSError, ValueError, KeyError):
        return None


def clear(beats: str | Path, rank: int) -> None:
    """Forget a rank's note, before it is started again."""
    _path(beats, rank).unlink(missing_ok=True)


def first_to_say(beats: str, text: str) -> bool:
    """Whether this is the first rank of this host to say these words."""
    name = "said-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    try:
        os.close(os.open(Path(beats) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def set_flag(beats: str | Path | None, flag: str) -> None:
    """Tell all processes of this launch of something that holds from now on."""
    if beats is not None:
        with suppress(OSError):  # the launcher and its folder are gone: nobody will ask
            (Path(beats) / flag).touch()


def clear_flag(beats: str | Path, flag: str) -> None:
    """Take a flag back, before the ranks are started again."""
    (Path(beats) / flag).unlink(missing_ok=True)


def has_flag(beats: str | Path | None, flag: str) -> bool:
    """Whether some process of this launch has set the flag."""
    return beats is not None and (Path(beats) / flag).exists()


def _path(beats: str | Path, rank: int) -> Path:
    return Path(beats) / f"rank-{rank}.note"
