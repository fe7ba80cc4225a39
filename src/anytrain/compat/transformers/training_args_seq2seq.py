"""HF's module `transformers.training_args_seq2seq`."""

from anytrain.compat.transformers import other_names
from anytrain.doors.training_args import Seq2SeqTrainingArguments

__all__ = ["Seq2SeqTrainingArguments"]

__getattr__ = other_names.module_getattr(__name__)
