"""What a rank says when an error ends it: its own error once, a peer's death not at all.

When a rank dies, every other one fails in the middle of a collective call. Those errors are
consequences: whoever launched the job names the cause, so the survivors wait quietly for the
end and speak only if nobody ends them.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType

from anytrain.core.errors import PeerLost
from anytrain.machine.processes import notes
from anytrain.machine.processes.heartbeat import Beat, Pulse
from anytrain.machine.processes.stalls import RESUME

PATIENCE_S = 5.0
_LOOK_S = 0.2
_TRANSPORT_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_TRANSPORT_WORDS = ("gloo/", "NCCL", "ProcessGroup", "[c10d]")
_LOST_WORDS = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection was closed",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "unhandled system error",
    "communicator was aborted",
    "failed to recv",
)

# NCCL calls both a lost connection and a full /dev/shm an "unhandled system error".
_OWN_WORDS = ("shared memory", "/dev/shm", "no space left", "out of memory", "cannot allocate")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ErrorHooks:
    """The error hooks of one rank, put in place and taken away again."""

    def __init__(
        self,
        pulse: Pulse,
        size: int,
        hush: Callable[[], None],
        debug: bool,
        gone: Callable[[], list[Beat]] = list,
    ) -> None:
        self._pulse, self._size, self._hush, self._debug = pulse, size, hush, debug
        self._gone = gone
        self.failed = False
        self._hook: Hook = sys.excepthook
        self._thread_hook = threading.excepthook
        self._shows_faults = pulse.beats is None and _show_faults()
        sys.excepthook = self._on_error
        threading.excepthook = self._on_thread_error

    def restore(self) -> None:
        """Take the hooks away, unless somebody has put theirs on top."""
        if sys.excepthook == self._on_error:
            sys.excepthook = self._hook
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self._thread_hook
        if self._shows_faults:
            faulthandler.disable()

    def _on_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.failed = True
        pulse = self._pulse
        if self._debug:
            self._hook(kind, error, trace)
        if is_peer_lost(error):
            self._wait_for_the_end(error)
        elif isinstance(error, KeyboardInterrupt) and pulse.beats is not None:
            notes.leave(pulse.beats, pulse.rank, "interrupt", "")
        else:
            text = notes.words(error)
            notes.leave(pulse.beats, pulse.rank, "error", text)
            first = pulse.beats is None or notes.first_to_say(pulse.beats, text)
            if first and not self._debug:
                self._hook(kind, error, trace)
        self._hush()

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or self._debug or not is_peer_lost(args.exc_value):
            self._thread_hook(args)

    def _wait_for_the_end(self, error: BaseException) -> None:
        """Wait for the launcher to end this process; speak only where none does."""
        pulse = self._pulse
        self._hush()
        notes.leave(pulse.beats, pulse.rank, "peer lost", notes.text(error))
        sys.stdout.flush()
        until = time.monotonic() + PATIENCE_S
        gone: list[Beat] = []
        while time.monotonic() < until:
            # At once: while this waits, the others that have lost it are still there.
            gone = gone or (self._gone() if pulse.beats is None else [])
            time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))
        if pulse.beats is None:
            with suppress(OSError):
                os.write(2, f"anytrain: {self._peer_lost(error, gone)}\n".encode())
        # The transport's own clean-up would wait for the rank that is gone.
        os._exit(1)

    def _peer_lost(self, error: BaseException, gone: list[Beat]) -> PeerLost:
        who = ", ".join(f"rank {beat.rank} (pid {beat.pid})" for beat in gone) or "a peer"
        ended = "; ".join(
            f"rank {beat.rank} has ended; when it last spoke, it was {beat.where()}"
            for beat in gone
        )
        why = ended or "another rank died or closed its connection"
        whose = f"what rank {gone[0].rank} printed, if anything" if gone else "another rank's error"
        return PeerLost(
            f"Rank {self._pulse.rank} of {self._size} lost {who} {self._pulse.beat().where()}.",
            why=f"{why}; the transport said: {_gist(error)}.",
            fix=f"look for {whose}, then {RESUME}.",
        )


def _show_faults() -> bool:
    """Show the Python stack of a native crash, where no launcher of ours collects it."""
    if faulthandler.is_enabled():
        return False
    try:
        faulthandler.enable()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return False  # a notebook's or a test's stderr is no file
    return True


def is_peer_lost(error: BaseException) -> bool:
    """Whether the error, or what caused it, means that another rank is gone.

    >>> is_peer_lost(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    True
    >>> is_peer_lost(ConnectionResetError("Connection reset by peer"))
    False
    """
    return any(_says_lost(link) for link in _chain(error))


def _says_lost(error: BaseException) -> bool:
    text = notes.text(error)
    if any(word in text.lower() for word in _OWN_WORDS):
        return False
    ours = type(error).__name__ in _TRANSPORT_ERRORS or (
        type(error) is RuntimeError and any(word in text for word in _TRANSPORT_WORDS)
    )
    return ours and any(word in text.lower() for word in _LOST_WORDS)


def _gist(error: BaseException) -> str:
    """Return an error's first sentence, without the source path that torch puts before it."""
    text = re.sub(r"^\[[^\]]*/[^\]]*\]\s*", "", notes.text(error).strip()) or type(error).__name__
    return re.split(r"\.\s|\n", text)[0].rstrip(".")[:200]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
