"""The part of `Accelerator` that reports to trackers."""

from __future__ import annotations

from typing import Any

from anytrain.core.errors import WrongOrder
from anytrain.doors.accelerator.processes import ProcessView
from anytrain.doors.accelerator.settings import Settings
from anytrain.engine.recording import trackers


class Tracking(ProcessView, Settings):
    """Trackers, from the main process alone."""

    _log_with: list[Any]
    _trackers: trackers.Trackers | None

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with`."""
        self._trackers = trackers.Trackers(
            self._log_with, self.logging_dir, is_main=self.is_main_process
        )
        self._trackers.start(project_name, config, init_kwargs or {})

    @property
    def trackers(self) -> list[Any]:
        """The trackers that are running."""
        return [] if self._trackers is None else list(self._trackers)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a running tracker, or the library's own object below it."""
        if self._trackers is None:
            raise WrongOrder(
                f"Cannot get the tracker {name!r}.",
                why="no tracker was started.",
                fix=f'pass Accelerator(log_with="{name}") and call init_trackers() first.',
            )
        return self._trackers.get(name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log to every running tracker, from the main process."""
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs or {})
