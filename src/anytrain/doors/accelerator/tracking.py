"""The part of `Accelerator` that reports to trackers."""

from __future__ import annotations

from typing import Any

from anytrain.core.errors import WrongOrder
from anytrain.core.records import LOGGED
from anytrain.doors.accelerator.settings import AcceleratorSettings
from anytrain.doors.accelerator.states import ProcessView
from anytrain.engine.assemble.step_boundary import BetweenSteps
from anytrain.engine.recording import trackers
from anytrain.engine.recording.record import Record
from anytrain.engine.recording.trackers.general import GeneralTracker, as_numbers


class Tracking(ProcessView, AcceleratorSettings):
    """Trackers, from the main process alone."""

    _log_with: list[Any]
    _trackers: trackers.Trackers | None
    _record: Record | None
    _restored: int | None
    _between: BetweenSteps
    _project: tuple[str | None, dict[str, Any]]

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: The project's name in each tracker.
            config: Settings to write down with the run: numbers and text by name.
            init_kwargs: Options for single trackers, by their names: {"wandb": {"entity":
                "us"}}.
        """
        self._project = (project_name, dict(config or {}))
        self._trackers = trackers.Trackers(
            self._log_with,
            self.logging_dir,
            is_main=self.is_main_process,
            run_folder=None if self._record is None else self._record.folder,
        )
        self._trackers.start(project_name, config, init_kwargs or {})

    @property
    def trackers(self) -> list[Any]:
        """The trackers that are running."""
        return [] if self._trackers is None else list(self._trackers)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a running tracker, or the library's own object below it.

        Where nothing is to be tracked it is one that records nothing.

        Args:
            name: The tracker's name: "tensorboard".
            unwrap: Whether to return the library's own object.
        """
        if self._trackers is None and not self._log_with:
            return GeneralTracker(_blank=True)
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
        """Log to every running tracker and to the run's folder, from the main process.

        Where there is a project_dir, `metrics.jsonl` in it holds what was logged, trackers or not;
        without `step` it is at the update that the training has come to. A "loss" among the values
        is the curve that is shown; without one it is what went through `backward`.

        Args:
            values: Numbers by name; tensors with one value are read.
            step: The step that they are of. None: the update that the training has come
                to.
            log_kwargs: Options for single trackers, by their names.
        """
        if self._run.losses is not None and "loss" in values:
            self._run.losses.leave_to_user()
        is_watched = self._run.session.observer.is_watching
        if self._record is not None and self.is_main_process and not is_watched:
            with self._record.harmless():
                self._between.open()
                self._note(self._record, as_numbers(values), step)
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs or {})

    def _note(self, record: Record, values: dict[str, Any], step: int | None) -> None:
        """Add values to the run's log; the first ones after an update begin its history.

        A run that was put back goes on with these: what earlier ones logged from this step on
        is not its own.
        """
        updates = self._run.session.cursor.updates
        at = updates if step is None else step
        if not record.journal.has_begun and updates > (self._restored or 0):
            if self._restored is None:
                record.journal.begin(0)
            else:
                record.journal.go_on(max(at - 1, 0), of=LOGGED)
            record.count_from(self._restored or 0)
        epoch = values.get("epoch")
        record.log(at, epoch if isinstance(epoch, int | float) else None, values)
