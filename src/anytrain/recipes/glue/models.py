"""Load the tokenizer, the configuration and the model, and give the model its labels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.recipes.glue.arguments import ModelArguments, overrides
from anytrain.recipes.glue.network import cached_if_unreachable
from anytrain.recipes.glue.tasks import Labels, adopt


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A tokenizer, a configuration that knows the labels, and those labels."""

    tokenizer: Any
    config: Any
    labels: Labels


def prepare(
    asked: ModelArguments, labels: Labels | None, *, task: str | None, trained: bool
) -> ModelParts:
    """Return the model's tokenizer and configuration, fitted to the labels of the data.

    Without labels the model keeps those that it has.
    """
    auto = _transformers()
    where = {
        "cache_dir": asked.cache_dir,
        "revision": asked.model_revision,
        "token": asked.token,
        "trust_remote_code": asked.trust_remote_code,
    }
    named = asked.config_name or asked.model_name_or_path
    config = _from_hub("configuration", named, auto.AutoConfig, where)
    _override(config, overrides(asked.config_overrides))
    reads = asked.tokenizer_name or asked.model_name_or_path
    fast = {"use_fast": asked.use_fast_tokenizer}
    tokenizer = _from_hub("tokenizer", reads, auto.AutoTokenizer, where | fast)
    if labels is None:
        names = tuple(str(config.id2label[number]) for number in range(config.num_labels))
        labels = Labels(names if len(names) > 1 else ())
    else:
        labels = _set_labels(config, labels, task=task, trained=trained, new=asked.is_new)
    _give_padding(tokenizer, config)
    _fit_vocabulary(tokenizer, config, new=asked.is_new)
    return ModelParts(tokenizer, config, labels)


def build(asked: ModelArguments, parts: ModelParts) -> Any:
    """Return the model: with its trained weights, or new where it is made from scratch."""
    import torch

    kind = _transformers().AutoModelForSequenceClassification
    if asked.is_new:
        trust = asked.trust_remote_code
        return kind.from_config(parts.config, trust_remote_code=trust).float()
    where = {
        "cache_dir": asked.cache_dir,
        "revision": asked.model_revision,
        "token": asked.token,
        "trust_remote_code": asked.trust_remote_code,
        "ignore_mismatched_sizes": asked.ignore_mismatched_sizes,
        # Weights that are learnt stay in float32, whatever they were stored in.
        "dtype": torch.float32,
    }
    return _from_hub("model", asked.model_name_or_path, kind, where | {"config": parts.config})


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise BadInput(
            "Cannot load a model.",
            why="models and tokenizers come from the library transformers, which is not installed.",
            fix="pip install -e '.[text]' in the checkout of anytrain.",
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _from_hub(what: str, name: str | None, kind: Any, options: Mapping[str, Any]) -> Any:
    """Load one part, with the library's complaints put into our words."""
    alone = nullcontext() if Path(str(name)).exists() else cached_if_unreachable()
    try:
        with alone:
            return kind.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).strip().split("\n")[0].rstrip(".")
        raise BadInput(
            f"Cannot load the {what} {name!r}.",
            why=f"{said}.",
            fix="give the folder of a model that save_pretrained wrote, or a name that the hub "
            "knows; with no network only folders and what is cached can be loaded."
            + (" --config_overrides makes a new model, without weights." * (what == "model")),
        ) from None
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise BadInput(
            f"The head of {name!r} does not fit these labels.",
            why=f"it was trained for others, and {options['config'].num_labels} are needed.",
            fix="pass --ignore_mismatched_sizes to give it a new head.",
        ) from None


def _set_labels(
    config: Any, labels: Labels, *, task: str | None, trained: bool, new: bool
) -> Labels:
    """Write the labels into the configuration, in the model's own order where it has them."""
    known = None if new else _known(config)
    fitted = adopt(labels, known, trained=trained)
    if fitted is None:
        if not trained:
            raise BadInput(
                "This model's labels are not those of the data.",
                why=f"it knows {', '.join(known or ())}; the data holds {', '.join(labels.names)}.",
                fix="give data with its labels, or train it first with --do_train.",
            )
        give_notice(
            f"The model's own labels ({', '.join(known or ())}) are not those of the data "
            f"({', '.join(labels.names)}): the data's are used.",
            stacklevel=2,
        )
        fitted = labels
    config.num_labels = max(1, len(fitted.names))
    kind = "regression" if fitted.is_regression else "single_label_classification"
    config.problem_type = kind
    if fitted.names:
        config.label2id = {name: number for number, name in enumerate(fitted.names)}
        config.id2label = dict(enumerate(fitted.names))
    if task is not None:
        config.finetuning_task = task
    return fitted


def _known(config: Any) -> dict[str, int] | None:
    """Return the labels a model was given, or None where it has only default names."""
    mapping: dict[str, int] = {str(name): int(n) for name, n in (config.label2id or {}).items()}
    default = {f"LABEL_{number}": number for number in range(len(mapping))}
    return None if mapping == default else mapping


def _override(config: Any, values: Mapping[str, str]) -> None:
    for name, text in values.items():
        if not hasattr(config, name):
            raise BadInput(
                f"Cannot override {name!r}.",
                why=f"a {config.model_type} configuration has no such value.",
                fix=f"pass names that it has, such as {', '.join(_near(config, name))}.",
            )
        setattr(config, name, _like(getattr(config, name), name, text))


def _like(old: Any, name: str, text: str) -> Any:
    """Return the text as the kind of value it replaces."""
    try:
        if isinstance(old, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return type(old)(text) if isinstance(old, int | float) else text
    except (KeyError, ValueError):
        raise BadInput(
            f"Cannot override {name!r} with {text!r}.",
            why=f"it is {old!r}, and the new value must be of the same kind.",
            fix=f"write --config_overrides {name}={old}, with another value.",
        ) from None


def _near(config: Any, name: str) -> list[str]:
    from difflib import get_close_matches

    names = [known for known in config.to_dict() if not known.startswith("_")]
    usual = [known for known in ("hidden_size", "num_hidden_layers") if known in names]
    return get_close_matches(name, names, n=3) or usual or names[:3]


def _give_padding(tokenizer: Any, config: Any) -> None:
    """Let batches be padded by a tokenizer that has no token for it, as language models' do."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise BadInput(
                "This tokenizer cannot pad.",
                why="it has neither a padding token nor one that ends a text.",
                fix="give it a pad_token and save it again, or choose another --tokenizer_name.",
            )
        tokenizer.pad_token = tokenizer.eos_token
        give_notice(
            f"The tokenizer has no padding token: {tokenizer.eos_token!r} is used for it.",
            stacklevel=2,
        )
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id


def _fit_vocabulary(tokenizer: Any, config: Any, *, new: bool) -> None:
    """Give a new model a place for each token; refuse a trained one that lacks some."""
    places = getattr(config, "vocab_size", None)
    if not isinstance(places, int) or places >= len(tokenizer):
        return
    if new:
        config.vocab_size = len(tokenizer)
        return
    raise BadInput(
        "The tokenizer and the model do not belong together.",
        why=f"the tokenizer has {len(tokenizer)} tokens, and the model knows {places}.",
        fix="leave out --tokenizer_name, or give the one this model was trained with.",
    )
