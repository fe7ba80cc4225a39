"""Stop between two steps when a signal asks for it, at the same step on every rank.

A handler only takes note. At the next boundary (the loop asks for its next batch, an update is
complete) the run is saved and the process leaves. Among several ranks a thread reads the board:
once a stop is wanted, each rank tells how many boundaries it has passed and passes no further one
before the last that any rank passed is known. All stop at the one after it, so none begins a step
that another will not join.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

from anytrain.core.environment import STOP_SIGNALS, in_notebook
from anytrain.machine.parallel.world import World
from anytrain.machine.processes import notes, parent_death

DEFAULT_SIGNALS = tuple(signal.Signals[name] for name in STOP_SIGNALS)
_POLL_S = 0.05
_AGREE_S = 20.0
_PATIENCE_S = 5.0
_ONE_WISH_S = 0.5
"""Signals of one kind within so long are one wish: a terminal's reaches the ranks, and their
launcher passes its own on."""
_LEAVING_S = 5.0
"""For so long after its save a process that leaves takes another Ctrl-C for the same wish: what is
taken down at its end (the record, trackers, workers) must not be cut in two."""
_generations = count()
_armed: set[Interrupts] = set()


class Interrupted(SystemExit):
    """The run was saved and ends because a signal asked for it; the code is 128 + the signal."""


class Interrupts:
    """One run's stop between two steps."""

    def __init__(
        self,
        world: World,
        save: Callable[[], str],
        is_walking: Callable[[], bool],
        *,
        signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS,
        beats: str | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._world = world
        self._save = save
        self._is_walking = is_walking
        self._signals = signals
        self._beats = beats
        self._wake = wake
        """Called when a signal has come, so that the next boundary is not passed over."""
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._done = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._is_armed = False
        self._thread: threading.Thread | None = None
        self._forget()

    @property
    def counts(self) -> bool:
        """Whether ranks count the boundaries they pass, so that none may be passed over."""
        return self._world.size > 1

    def _forget(self) -> None:
        """Begin anew: a notebook's next loop must not stop for an old signal."""
        self._prefix = f"stop/{next(_generations)}"
        self._wanted: int | None = None
        self._first_of: dict[int, float] = {}
        self._is_announced = False
        self._is_leaving = False
        self._leaves_until: float | None = None
        self._passed = 0
        self._last: int | None = None
        self._acknowledged = False
        self._decided.clear()
        self._done.clear()

    def arm(self) -> None:
        """Take the signals, in the main thread alone; start to listen to the other ranks."""
        if self._is_armed or threading.current_thread() is not threading.main_thread():
            return
        self._forget()
        self._is_armed = True
        # What is ignored stays ignored: whoever started this process with `nohup` meant it.
        heard = [n for n in self._signals if signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heard}
        _armed.add(self)
        # A thread that talks to the store must be gone before the interpreter is taken down.
        atexit.register(self.disarm)
        if self._world.size > 1:
            self._thread = threading.Thread(target=self._listen, name="anytrain-stop", daemon=True)
            self._thread.start()

    def disarm(self) -> None:
        """Give the signals back."""
        atexit.unregister(self.disarm)
        self._stop_listening()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                self._give_back(number, handler)
        self._before, self._is_armed = {}, False
        _armed.discard(self)

    def _stop_listening(self) -> None:
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_AGREE_S)

    def _give_back(self, number: signal.Signals, handler: Any) -> None:
        """Put a handler back; where a later run took the signal, that one puts it back."""
        if self._leaves_until is not None and handler is signal.default_int_handler:
            handler = _Late(self._leaves_until)
        if signal.getsignal(number) == self._note:
            signal.signal(number, handler)
        for other in _armed:
            if other._before.get(number) == self._note:
                other._before[number] = handler

    def hand_back(self) -> None:
        """Give the signals back at a run's end; one that came too late for a step comes again."""
        was_armed = self._is_armed
        self.disarm()
        if was_armed and self._wanted is not None and not self._is_leaving:
            signal.raise_signal(self._wanted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The launcher ends the survivors: there is nothing to save.
        if notes.has_flag(self._beats, notes.PEER_DIED):
            os._exit(128 + number)
        parent_death.replace_lost_terminal()
        if self._leaves_until is not None:
            self._note_late(number)
            return
        # Only this process's own are counted: a peer's wish is no second Ctrl-C.
        now = time.monotonic()
        first = self._first_of.setdefault(number, now)
        if now > first:
            if now - first >= _ONE_WISH_S:
                self._insist(number)
            return
        if self._is_leaving:
            return
        if self._wanted != number:
            self._wanted = number
            self._wake()
            if self._is_walking():
                notes.set_flag(self._beats, notes.SAVING)
            self._announce(number)
        self._remind_later(number)

    def _announce(self, number: int) -> None:
        """Say once for all ranks what is going to happen."""
        if self._world.rank == 0 and not self._is_announced:
            self._is_announced = True
            asked = f"asked to stop by {notes.asked_by(number)}"
            _say(f"anytrain: {asked}: saving after this step, then stopping.")

    def _note_late(self, number: int) -> None:
        """The run is saved, and the process on its way out; only where that takes long, hurry."""
        if time.monotonic() >= (self._leaves_until or 0.0):
            self._yield_to_default(number)

    def _insist(self, number: int) -> None:
        """Stop at once for a second Ctrl-C, and for what comes again where no loop will see it."""
        if number == signal.SIGINT:
            self.disarm()
            raise KeyboardInterrupt
        if not self._is_leaving and not self._is_walking():
            self._yield_to_default(number)

    def _remind_later(self, number: int) -> None:
        if not self._is_walking():
            reminder = threading.Timer(_PATIENCE_S, self._remind, (number,))
            reminder.daemon = True
            reminder.start()

    def _remind(self, number: int) -> None:
        """Ask once more where no loop has come that could have stopped."""
        if not self._is_walking() and not self._done.is_set():
            os.kill(os.getpid(), number)

    def _yield_to_default(self, number: int) -> None:
        """Outside any loop there is no step to finish: do what the signal does by itself."""
        self.disarm()
        signal.raise_signal(number)

    def boundary(self) -> None:
        """Between two steps: leave here if this is the step after which every rank stops."""
        if self._world.size == 1:
            if self._wanted is not None:
                self._leave(self._wanted)
            return
        with self._lock:
            if not self._acknowledged:
                self._passed += 1
                return
        # A stop is wanted and this rank has told where it is: wait to learn the last step.
        if not self._decided.wait(_AGREE_S):
            self._give_up()
        if self._last is None or self._passed >= self._last:
            self._leave(self._wanted or signal.SIGTERM)
        self._passed += 1

    def _leave(self, number: int) -> None:
        self._is_leaving = True  # a repeated SIGTERM must not kill the save it asked for
        try:
            told = self._save()
        except BaseException:
            self.disarm()
            raise
        stays = number == signal.SIGINT and in_notebook()
        if stays:
            self.disarm()
        else:  # whoever ends the run gives the signals back, or the process's end does
            self._leaves_until = time.monotonic() + _LEAVING_S
            self._stop_listening()
        if self._world.rank == 0:
            _say(f"anytrain: {told}")
        notes.leave(self._beats, self._world.rank, "preempted", told)
        if stays:
            raise KeyboardInterrupt
        raise Interrupted(128 + number)

    def _give_up(self) -> None:
        """Leave without saving: a rank did not answer, so no common step can be found."""
        _say(f"anytrain: rank {self._world.rank} leaves without saving: a rank did not answer.")
        os._exit(128 + (self._wanted or signal.SIGTERM))

    def _listen(self) -> None:
        """Carry the wish to the other ranks, and theirs here."""
        board, rank = self._world.board, self._world.rank
        wanted_key, last_key = f"{self._prefix}/wanted", f"{self._prefix}/last"
        told = False
        while not self._done.wait(_POLL_S):
            try:
                if self._wanted is not None and not told:
                    board.post(wanted_key, str(self._wanted))
                    told = True
                wanted = board.read(wanted_key)
                if wanted is None:
                    continue
                if not self._acknowledged:
                    with self._lock:
                        self._acknowledged = True
                        passed = self._passed
                    self._wanted = self._wanted or int(wanted)
                    self._announce(self._wanted)
                    board.post(f"{self._prefix}/passed/{rank}", str(passed))
                if rank == 0:
                    self._decide(last_key)
                last = board.read(last_key)
                if last is not None:
                    self._last = int(last)
                    self._decided.set()
                    return
            except Exception:  # noqa: BLE001 -- the store is gone: so are the others
                return

    def _decide(self, last_key: str) -> None:
        board = self._world.board
        deadline = time.monotonic() + _AGREE_S
        while time.monotonic() < deadline and not self._done.is_set():
            told = [board.read(f"{self._prefix}/passed/{r}") for r in range(self._world.size)]
            if all(value is not None for value in told):
                board.post(last_key, str(max(int(value) for value in told if value is not None)))
                return
            time.sleep(_POLL_S)


class _Late:
    """Python's own answer to Ctrl-C, once a process that was told to leave has had time to."""

    def __init__(self, until: float) -> None:
        self._until = until

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Interrupt, unless the wish is being fulfilled."""
        if time.monotonic() >= self._until:
            signal.default_int_handler(number, frame)


def _say(text: str) -> None:
    # Not through sys.stderr: a signal may have come in the middle of a print. In a terminal the
    # cursor may stand before a progress bar, whose rest would stay behind the text.
    rest = "\x1b[J" if os.isatty(2) else ""
    with suppress(OSError):  # whoever read it may be gone: Ctrl-C ends `| tee log`, too
        os.write(2, f"{rest}{text}\n".encode())
