"""HF's module `transformers.training_args_seq2seq`."""

from anytrain.doors.training_args import Seq2SeqTrainingArguments

__all__ = ["Seq2SeqTrainingArguments"]
