"""Record a run with TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from anytrain.core.notices import give_notice
from anytrain.engine.recording.disk import replace
from anytrain.engine.recording.trackers.general import (
    GeneralTracker,
    as_numbers,
    flatten,
    library,
    settings,
)


class TensorBoardTracker(GeneralTracker):
    """Write event files into `logging_dir/run_name`; other arguments go to `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self._library = library("torch.utils.tensorboard", self.name)
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self._options = kwargs
        self._left_out: set[str] = set()

    @property
    def tracker(self) -> Any:
        return self.writer

    def go_on(self, run: str, step: int) -> None:
        """Hide what an earlier life of the run wrote after that step; the folder is the same."""
        self._options = {"purge_step": step + 1, **self._options}

    def kept_as(self) -> str | None:
        return self.run_name

    def start(self) -> None:
        self.writer = self._library.SummaryWriter(self.logging_dir, **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings for the HPARAMS tab, and as `hparams.yml` beside the events."""
        config = settings(values)
        # SummaryWriter.add_hparams would open a second run in a folder named by the clock.
        for summary in self._library.summary.hparams(_one_level(config), {}):
            self.writer.file_writer.add_summary(summary)
        self.writer.flush()
        replace(Path(self.logging_dir) / "hparams.yml", yaml.safe_dump(config, sort_keys=False))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts, and mappings of numbers that share one chart."""
        for key, value in as_numbers(values).items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self._log_group(key, value, step, kwargs)
            else:
                self._leave_out(key, value)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches or lists of images by name.

        Arrays are (N, C, H, W) unless `dataformats` says otherwise; PIL images need no word.
        """
        for key, images in values.items():
            options = dict(kwargs)
            if isinstance(images, list | tuple):
                if images and not hasattr(images[0], "shape"):  # PIL images have a size instead
                    images = [np.asarray(image.convert("RGB")) for image in images]
                    options["dataformats"] = "NHWC"
                images = np.stack([np.asarray(image) for image in images])
            self.writer.add_images(key, images, global_step=step, **options)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()

    def _log_group(
        self, key: str, group: Mapping[str, Any], step: int | None, options: Mapping[str, Any]
    ) -> None:
        numbers = {}
        for name, value in flatten(group).items():
            if isinstance(value, int | float):
                numbers[name] = value
            else:
                self._leave_out(f"{key}/{name}", value)
        if numbers:
            self.writer.add_scalars(key, numbers, global_step=step, **options)

    def _leave_out(self, key: str, value: object) -> None:
        if key in self._left_out:
            return
        self._left_out.add(key)
        give_notice(
            f"TensorBoard does not record {key!r}: it takes numbers and texts, and this is a "
            f"{type(value).__name__}. The other values are recorded.",
            stacklevel=4,
        )


def _one_level(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as TensorBoard takes them: numbers, truth values and texts."""
    flat = flatten(config)
    return {k: v if isinstance(v, int | float | str) else str(v) for k, v in flat.items()}
