"""Record a run with MLflow."""

from __future__ import annotations

import os
import re
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.engine.recording.trackers.general import (
    GeneralTracker,
    as_numbers,
    flatten,
    is_installed,
    library,
    settings,
)

_PARAMS_A_CALL = 100  # what one request to an MLflow server may carry
_PARAM_CHARACTERS = 6000
_NESTED = "MLFLOW_NESTED_RUN"
_NOT_IN_A_NAME = re.compile(r"[^\w/.\- :]")


class MLflowTracker(GeneralTracker):
    """Log to an MLflow run of an experiment.

    The store is the one MLflow is set to use (`mlflow.set_tracking_uri`, or its environment
    variables). `logging_dir` is where a new experiment keeps its artifacts. An argument beats
    MLflow's environment variable of the same meaning. Inside `with mlflow.start_run():` that run
    is logged to, and left open; `nested_run` or another `run_id` asks for a run of its own.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | None = None,
        nested_run: bool | None = None,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self._mlflow = library("mlflow", self.name)
        self.experiment_name = experiment_name
        self.logging_dir = logging_dir
        self.nested_run = _nested() if nested_run is None else nested_run
        self._tags = tags
        self._options = {
            "run_id": run_id,
            "nested": self.nested_run,
            "run_name": run_name,
            "tags": tags,
            "description": description,
        }
        self._goes_on_in: str | None = None
        self._is_users = False
        self._told: set[str] = set()

    @property
    def tracker(self) -> Any:
        return self.active_run

    def go_on(self, run: str, step: int) -> None:
        """Go on in that run, unless its store has it no more."""
        if self._options["run_id"] is None and environment.variable("MLFLOW_RUN_ID") is None:
            self._goes_on_in = run

    def kept_as(self) -> str | None:
        return str(self._run_id)

    def start(self) -> None:
        """Open the run, in a new experiment where none has the name, or take the one in use."""
        _check_store(self._mlflow.get_tracking_uri())
        active = self._mlflow.active_run()
        asked = self._options["run_id"]
        self._is_users = (
            active is not None and not self.nested_run and asked in (None, active.info.run_id)
        )
        if self._is_users:
            self.active_run = active
            self._mlflow.set_tags(self._tags or {})
        else:
            if self._goes_on_in is not None and self._is_known(self._goes_on_in):
                self._options["run_id"] = self._goes_on_in
            experiment = self._experiment()
            self.active_run = self._mlflow.start_run(experiment_id=experiment, **self._options)
        self._run_id = self.active_run.info.run_id

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters; those that a run has already cannot change."""
        params = [self._param(*item) for item in flatten(settings(values)).items()]
        if self._is_users or self._options["run_id"] is not None:
            known = self._mlflow.MlflowClient().get_run(self._run_id).data.params
            params = [(key, value) for key, value in params if key not in known]
        for first in range(0, len(params), _PARAMS_A_CALL):
            some = dict(params[first : first + _PARAMS_A_CALL])
            self._mlflow.log_params(some, run_id=self._run_id)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; nested ones get names joined by a slash."""
        metrics = {}
        for key, value in flatten(as_numbers(values)).items():
            if isinstance(value, int | float):
                metrics[self._name(key)] = float(value)
            else:
                self._tell(key, f"it takes numbers, and this is a {type(value).__name__}")
        # The active run belongs to one thread; the run's id holds in all of them.
        self._mlflow.log_metrics(metrics, step=step, **{"run_id": self._run_id, **kwargs})

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        client = self._mlflow.MlflowClient()
        for key, images in values.items():
            for number, image in enumerate(images):
                one = f"{self._name(key)}/{number}"
                client.log_image(self._run_id, image, key=one, step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        client = self._mlflow.MlflowClient()
        client.log_figure(self._run_id, figure, artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        self._mlflow.log_artifacts(local_dir, artifact_path, run_id=self._run_id)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        self._mlflow.log_artifact(local_path, artifact_path, run_id=self._run_id)

    def finish(self) -> None:
        """Close the run, and no other: not one that was open before."""
        if self._is_users:
            return
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self._run_id:
            self._mlflow.end_run()
        else:
            self._mlflow.MlflowClient().set_terminated(self._run_id)

    def _experiment(self) -> str | None:
        if self.experiment_name is None:
            return None
        known = self._mlflow.get_experiment_by_name(self.experiment_name)
        if known is not None:
            return str(known.experiment_id)
        folder = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(
            self._mlflow.create_experiment(
                self.experiment_name, artifact_location=folder, tags=self._tags
            )
        )

    def _is_known(self, run: str) -> bool:
        try:
            self._mlflow.MlflowClient().get_run(run)
        except self._mlflow.exceptions.MlflowException:
            return False
        return True

    def _param(self, key: str, value: Any) -> tuple[str, Any]:
        text = str(value)
        if len(text) > _PARAM_CHARACTERS:
            self._tell(key, f"only its first {_PARAM_CHARACTERS} of {len(text)} characters fit")
        return self._name(key), text[:_PARAM_CHARACTERS]

    def _name(self, key: str) -> str:
        allowed = _NOT_IN_A_NAME.sub("_", key)
        if allowed != key:
            self._tell(key, f"its names have no such characters, so it is called {allowed!r}")
        return allowed

    def _tell(self, key: str, why: str) -> None:
        if key not in self._told:
            self._told.add(key)
            give_notice(f"MLflow does not record {key!r} as it is: {why}.", stacklevel=4)


def _check_store(uri: str) -> None:
    if uri.startswith("sqlite:") and not is_installed("sqlalchemy"):
        raise BadInput(
            f"MLflow cannot write to its store {uri}.",
            why="a database store needs SQLAlchemy and alembic, which mlflow-skinny comes without.",
            fix="`pip install sqlalchemy alembic` (or the whole of mlflow), or set "
            "MLFLOW_TRACKING_URI to a tracking server.",
        )


def _nested() -> bool:
    """Whether HF's variable asks for a run inside the active one."""
    return environment.flag({_NESTED: environment.variable(_NESTED) or ""}, _NESTED)
