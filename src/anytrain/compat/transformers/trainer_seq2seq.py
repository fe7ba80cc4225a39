"""HF's module `transformers.trainer_seq2seq`."""

from anytrain.doors.trainer.seq2seq import Seq2SeqTrainer

__all__ = ["Seq2SeqTrainer"]
