"""`Seq2SeqTrainer`: a Trainer whose evaluation may write its answers with `generate`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytrain.core.errors import BadInput, BadType
from anytrain.doors.trainer.outputs import PredictionOutput
from anytrain.doors.trainer.trainer import Trainer

if TYPE_CHECKING:
    from transformers import GenerationConfig

# What generate() takes where neither the model nor the call says how long an answer may be.
_DEFAULT_LENGTH = 20
_FROM_LABELS = ("decoder_input_ids", "decoder_attention_mask")


class Seq2SeqTrainer(Trainer):
    """Train a sequence-to-sequence model; with predict_with_generate, judge what it writes.

    Args:
        *args: What Trainer takes, by position.
        **kwargs: What Trainer takes, by name; `args` is a Seq2SeqTrainingArguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gen_kwargs: dict[str, Any] = {}
        wanted = getattr(self.args, "generation_config", None)
        if wanted is not None:
            self.model.generation_config = self.load_generation_config(wanted)

    @staticmethod
    def load_generation_config(gen_config_arg: str | Path | GenerationConfig) -> GenerationConfig:
        """Return a checked GenerationConfig from one, a file, a folder or a hub's name.

        Args:
            gen_config_arg: A GenerationConfig, a file, a folder, or a model's name on the
                hub.
        """
        from transformers import GenerationConfig

        if isinstance(gen_config_arg, GenerationConfig):
            config = deepcopy(gen_config_arg)
        elif Path(gen_config_arg).is_file():
            place = Path(gen_config_arg)
            config = GenerationConfig.from_pretrained(str(place.parent), place.name)
        else:
            config = GenerationConfig.from_pretrained(str(gen_config_arg))
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise BadInput(
                f"Cannot use the generation config {gen_config_arg}.",
                why=f"{error}. It would fail at the end, when it is saved with the model.",
                fix="correct these values, or leave generation_config out.",
            ) from error
        return config

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate; `gen_kwargs` (max_length, num_beams...) go to `generate`.

        Args:
            eval_dataset: A data set, the name of one in the Trainer's dict of data sets,
                or a dict of several. None: the Trainer's own.
            ignore_keys: What of a model's output to leave out of the predictions, by name.
                None: what its config names in keys_to_ignore_at_inference, else
                past_key_values.
            metric_key_prefix: What the names of metrics begin with: "eval" gives
                eval_loss.
            **gen_kwargs: What goes to `generate`, such as max_length and num_beams; it
                beats the arguments' own.
        """
        self._gen_kwargs = self._with_defaults(gen_kwargs)
        return super().evaluate(
            eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict; `gen_kwargs` (max_length, num_beams...) go to `generate`.

        Args:
            test_dataset: The samples to predict.
            ignore_keys: What of a model's output to leave out of the predictions, by name.
                None: what its config names in keys_to_ignore_at_inference, else
                past_key_values.
            metric_key_prefix: What the names of metrics begin with: "test" gives
                test_loss.
            **gen_kwargs: What goes to `generate`, such as max_length and num_beams; it
                beats the arguments' own.
        """
        self._gen_kwargs = self._with_defaults(gen_kwargs)
        return super().predict(
            test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return the loss, what the model wrote, and the labels, for one batch.

        Args:
            model: The model, in evaluation mode.
            inputs: The batch.
            prediction_loss_only: Whether to return the loss alone.
            ignore_keys: What of a model's output to leave out of the predictions, by name.
                None: what its config names in keys_to_ignore_at_inference, else
                past_key_values.
            **gen_kwargs: What goes to `generate`.
        """
        if prediction_loss_only or not getattr(self.args, "predict_with_generate", False):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        written = self._generate(inputs, gen_kwargs or self._gen_kwargs)
        loss = None
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
            labels = self._lengthen(labels)
        return loss, self._lengthen(written), labels

    def _with_defaults(self, gen_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what the call says about generating, and what the arguments say besides."""
        said = {key: value for key, value in gen_kwargs.items() if value is not None}
        length = getattr(self.args, "generation_max_length", None)
        beams = getattr(self.args, "generation_num_beams", None)
        if length is not None and "max_length" not in said and "max_new_tokens" not in said:
            said["max_length"] = length
        if beams is not None and "num_beams" not in said:
            said["num_beams"] = beams
        return said

    def _generate(self, inputs: dict[str, Any], gen_kwargs: dict[str, Any]) -> torch.Tensor:
        generate = getattr(self.model, "generate", None)
        if generate is None:
            raise BadType(
                f"{type(self.model).__name__} cannot generate text: it has no generate().",
                why="predict_with_generate evaluates the text that the model generates.",
                fix="use a model of transformers that generates, or leave "
                "predict_with_generate out.",
            )
        given, labels = dict(inputs), inputs.get("labels")
        start = given.get("decoder_input_ids")
        # A collator made them from the labels: the model would be handed the answer.
        if labels is not None and start is not None and start.shape == labels.shape:
            given = {key: value for key, value in given.items() if key not in _FROM_LABELS}
        with torch.no_grad(), self.compute_loss_context_manager():
            written: torch.Tensor = generate(**given, **gen_kwargs)
        return written

    def _lengthen(self, tokens: torch.Tensor) -> torch.Tensor:
        """Pad to the length the generation config allows, so that most batches agree."""
        config = getattr(self.model, "generation_config", None)
        width = getattr(config, "max_length", None) or _DEFAULT_LENGTH
        if tokens.shape[-1] >= width:
            width = (getattr(config, "max_new_tokens", None) or 0) + 1
        if tokens.shape[-1] >= width:
            return tokens
        return self._pad_tensors_to_max_len(tokens, width)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        missing = max_length - tensor.shape[-1]
        return nn.functional.pad(tensor, (0, missing), value=self._pad_token_id())

    def _pad_token_id(self) -> int:
        tokenizer, config = self.processing_class, getattr(self.model, "config", None)
        places = [(tokenizer, "pad_token_id"), (tokenizer, "eos_token_id")]
        for holder, name in [*places, (config, "pad_token_id")]:
            found = getattr(holder, name, None)
            if found is not None:
                return int(found)
        raise BadInput(
            "Cannot pad what the model wrote: nothing names a padding token.",
            why="answers of different lengths become one array.",
            fix="set tokenizer.pad_token, or model.config.pad_token_id.",
        )
