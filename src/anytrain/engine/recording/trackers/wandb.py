"""Record a run with Weights & Biases."""

from __future__ import annotations

from typing import Any

from anytrain.core import environment
from anytrain.engine.recording.trackers.general import GeneralTracker, library
from anytrain.engine.recording.trackers.values import read, settings


class WandBTracker(GeneralTracker):
    """Log to a wandb run in the project `run_name`; other arguments go to `wandb.init`.

    A run that is open already is logged to, and left open; `id` or `reinit` asks for another.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self._wandb = library("wandb", self.name)
        self.run_name = run_name
        self._options = {"project": run_name, **kwargs}
        self._asks_for_another = "id" in kwargs or "reinit" in kwargs
        self._is_users = False

    @property
    def tracker(self) -> Any:
        return self.run

    def go_on(self, run: str, step: int) -> None:
        """Go on in that run; steps that it has already, wandb keeps as they are."""
        if environment.variable("WANDB_RUN_ID") is None:
            self._options = {"id": run, "resume": "allow", **self._options}

    def kept_as(self) -> str | None:
        return str(self.run.id)

    def start(self) -> None:
        """Open the run, or take the one that is open."""
        active = self._wandb.run
        if active is not None and not self._asks_for_another:
            self.run = active
        else:
            self.run = self._wandb.init(**self._options)
        self._is_users = self.run is active

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(settings(values), allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(read(values), step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        images = {name: [self._wandb.Image(i) for i in many] for name, many in values.items()}
        self.run.log(images, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        table = self._wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        """Close the run, unless it was open before."""
        if not self._is_users:
            self.run.finish()
