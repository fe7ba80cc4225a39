"""Backends of HF's hyperparameter search: their names; what stands behind them is refused."""

from anytrain.compat.transformers import other_names
from anytrain.doors.trainer.outputs import HPSearchBackend

__all__ = ["ALL_HYPERPARAMETER_SEARCH_BACKENDS", "HPSearchBackend"]
__getattr__ = other_names.module_getattr(__name__)

ALL_HYPERPARAMETER_SEARCH_BACKENDS = {
    HPSearchBackend.OPTUNA: __getattr__("OptunaBackend"),
    HPSearchBackend.RAY: __getattr__("RayTuneBackend"),
    HPSearchBackend.WANDB: __getattr__("WandbBackend"),
}
