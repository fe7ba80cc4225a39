"""Record a run with Weights & Biases."""

from __future__ import annotations

from typing import Any

from anytrain.core import environment
from anytrain.engine.recording.trackers.general import RunTracker, settings


class WandBTracker(RunTracker):
    """Log to a wandb run in the project `run_name`; other arguments go to `wandb.init`.

    A run that is open already is logged to, and left open; `id` or `reinit` asks for another.
    """

    name = module = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._asks_for_another = "id" in kwargs or "reinit" in kwargs
        self._is_users = False

    def go_on(self, run: str, step: int) -> None:
        """Go on in that run; steps that it has already, wandb keeps as they are."""
        if environment.variable("WANDB_RUN_ID") is None:
            self._options = {"id": run, "resume": "allow", **self._options}

    def kept_as(self) -> str | None:
        return str(self.run.id)

    def start(self) -> None:
        """Open the run, or take the one that is open."""
        active = self._library.run
        if active is not None and not self._asks_for_another:
            self.run = active
        else:
            self.run = self._library.init(**self._options)
        self._is_users = self.run is active

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(settings(values), allow_val_change=True)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        images = {name: [self._library.Image(i) for i in many] for name, many in values.items()}
        self.run.log(images, step=step, **kwargs)

    def finish(self) -> None:
        """Close the run, unless it was open before."""
        if not self._is_users:
            self.run.finish()
