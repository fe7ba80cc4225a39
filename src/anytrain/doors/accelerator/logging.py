"""A logger and a progress bar that know which process they are in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, MutableMapping, Sized
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.doors.accelerator.states import live_session
from anytrain.engine.assemble import current


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that speaks on the main process, unless told otherwise.

    `main_process_only=False` speaks on every process; `in_order=True` one after the other.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, if this process should."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        text, options = self.process(msg, kwargs)
        if not in_order:
            if not main_only or _rank() == 0:
                self.logger.log(level, text, *args, **options)
            return
        world = live_session().world
        for turn in range(world.size):
            if turn == world.rank:
                self.logger.log(level, text, *args, **options)
            world.barrier("logging in order")

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """Leave the message as it is."""
        return msg, kwargs

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, but only the first time for the same words."""
        said: set[Any] = self.__dict__.setdefault("_said", set())
        if args not in said:
            said.add(args)
            self.warning(*args, **kwargs)


def _rank() -> int:
    """Return the rank; before any run, what the launcher said."""
    found = current.get()
    return environment.read().place.rank if found is None else found.world.rank


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that speaks on the main process alone, unless told otherwise."""
    level = log_level or environment.read().log_level
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar that shows on the main process alone, unless told otherwise.

    It is tqdm's own where tqdm is installed, else a plain one of ours with the same habits.
    """
    if args and isinstance(args[0], bool):
        raise BadInput(
            f"Cannot show progress over {args[0]}.",
            why="the first argument is what to iterate over.",
            fix=f"pass main_process_only={args[0]} by name.",
        )
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = live_session().world.local_rank != 0
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        return PlainBar(*args, **kwargs)
    return bar(*args, **kwargs)


class PlainBar:
    """A progress bar over rich, for machines without tqdm."""

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str | None = None,
        total: float | None = None,
        disable: bool | None = False,
        **unused: Any,
    ) -> None:
        from rich.progress import Progress

        self._iterable = iterable
        if total is None and isinstance(iterable, Sized):
            total = len(iterable)
        self.total = total
        self.n: float = 0
        self.disable = bool(disable)
        self._progress = Progress(disable=self.disable, transient=False)
        self._task = self._progress.add_task(desc or "", total=total)
        self._progress.start()

    def __iter__(self) -> Iterator[Any]:
        try:
            for item in self._iterable or ():
                yield item
                self.update()
        finally:
            self.close()

    def __len__(self) -> int:
        return int(self.total or 0)

    def update(self, n: float = 1) -> None:
        """Count `n` more."""
        self.n += n
        self._progress.advance(self._task, n)

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Change the words before the bar."""
        self._progress.update(self._task, description=desc or "")

    def set_postfix(self, values: dict[str, Any] | None = None, **more: Any) -> None:
        """Show values beside the bar."""
        shown = {**(values or {}), **more}
        self.set_description(", ".join(f"{key}={value}" for key, value in shown.items()))

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text)

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()

    def __enter__(self) -> PlainBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
