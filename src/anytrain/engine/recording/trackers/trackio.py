"""Record a run with trackio."""

from __future__ import annotations

from typing import Any

from anytrain.engine.recording.trackers.general import RunTracker, settings


class TrackioTracker(RunTracker):
    """Log to a trackio run in the project `run_name`; other arguments go to `trackio.init`."""

    name = module = "trackio"

    def go_on(self, run: str, step: int) -> None:
        self._options = {"name": run, "resume": "allow", **self._options}

    def kept_as(self) -> str | None:
        return str(self.run.name)

    def start(self) -> None:
        self.run = self._library.init(**self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add to the run's config; trackio stores it with the first values that are logged."""
        self.run.config.update(settings(values))

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of arrays or PIL images by name, in one table each: trackio lists none."""
        for name, images in values.items():
            rows = [[self._library.Image(image)] for image in images]
            self.log_table(name, columns=["image"], data=rows, step=step, **kwargs)

    def finish(self) -> None:
        self.run.finish()
