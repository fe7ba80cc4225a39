"""The part of `Accelerator` that tells how it was set up."""

from __future__ import annotations

from anytrain.doors.accelerator.options import DataLoaderConfiguration, ProjectConfiguration
from anytrain.engine.assemble.run import Run


class Settings:
    """What the constructor was given, as HF's properties name it."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _run: Run

    @property
    def device_placement(self) -> bool:
        """Whether prepared objects are put on the device."""
        return self._run.options.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers move with their optimizer."""
        return self._run.options.step_scheduler_with_optimizer

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut among the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled from the start."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is a function of seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches travel while the host goes on."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """What was asked; a prepared loader always knows its position."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The run's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The trackers' folder."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration
