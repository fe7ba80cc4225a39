"""Record a run with trackio."""

from __future__ import annotations

from typing import Any

from anytrain.engine.recording.trackers.general import GeneralTracker, library
from anytrain.engine.recording.trackers.values import read, settings


class TrackioTracker(GeneralTracker):
    """Log to a trackio run in the project `run_name`; other arguments go to `trackio.init`."""

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self._trackio = library("trackio", self.name)
        self.run_name = run_name
        self._options = {"project": run_name, **kwargs}

    @property
    def tracker(self) -> Any:
        return self.run

    def go_on(self, run: str, step: int) -> None:
        self._options = {"name": run, "resume": "allow", **self._options}

    def kept_as(self) -> str | None:
        return str(self.run.name)

    def start(self) -> None:
        self.run = self._trackio.init(**self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add to the run's config; trackio stores it with the first values that are logged."""
        self.run.config.update(settings(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(read(values), step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of arrays or PIL images by name, in one table each: trackio lists none."""
        for name, images in values.items():
            rows = [[self._trackio.Image(image)] for image in images]
            self.log_table(name, columns=["image"], data=rows, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        table = self._trackio.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        self.run.finish()
