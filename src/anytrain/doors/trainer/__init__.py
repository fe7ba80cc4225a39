"""Door 2: our loop, your model and data."""

from anytrain.doors.trainer.seq2seq import Seq2SeqTrainer
from anytrain.doors.trainer.trainer import Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
