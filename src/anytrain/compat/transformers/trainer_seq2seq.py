"""HF's module `transformers.trainer_seq2seq`."""

from anytrain.compat.transformers import other_names
from anytrain.doors.trainer.seq2seq import Seq2SeqTrainer

__all__ = ["Seq2SeqTrainer"]

__getattr__ = other_names.module_getattr(__name__)
