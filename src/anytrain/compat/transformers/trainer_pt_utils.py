"""HF's module `transformers.trainer_pt_utils`: arrays, samplers, and a Trainer's reports."""

from anytrain.compat.transformers import elsewhere
from anytrain.doors.trainer.outputs import metrics_format
from anytrain.doors.trainer.reports import Reports
from anytrain.doors.training_args import AcceleratorConfig

__all__ = ["AcceleratorConfig", "log_metrics", "metrics_format", "save_metrics", "save_state"]

# HF has these as functions that take a Trainer first.
log_metrics = Reports.log_metrics
save_metrics = Reports.save_metrics
save_state = Reports.save_state

__getattr__ = elsewhere.of(__name__)
