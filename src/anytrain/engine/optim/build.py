"""Optimizers by name, and the parameters that weight decay is for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import BadInput, Unsupported
from anytrain.core.nearest import nearest
from anytrain.engine.optim.adafactor import Adafactor

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def _boolean(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


Options = dict[str, Callable[[str], Any]]
_ADAMW: Options = {"amsgrad": _boolean, "foreach": _boolean, "maximize": _boolean}
_OPTIONS: dict[str, Options] = {
    "adamw_torch": _ADAMW,
    "adamw_torch_fused": {name: _ADAMW[name] for name in ("amsgrad", "maximize")},
    "adafactor": {
        "clip_threshold": float,
        "decay_rate": float,
        "beta1": float,
        "scale_parameter": _boolean,
        "relative_step": _boolean,
        "warmup_init": _boolean,
    },
    "sgd": {"momentum": float, "dampening": float, "nesterov": _boolean},
    "adagrad": {"lr_decay": float, "eps": float},
    "rmsprop": {"momentum": float, "alpha": float, "eps": float, "centered": _boolean},
}

_NEEDS = "it is {library}'s optimizer, and anytrain builds only those that torch and it have."
_OWN = "Trainer(optimizer_cls_and_kwargs=(TheClass, {...}))"
_LIBRARIES: dict[str, tuple[str, ...]] = {
    "bitsandbytes": (
        "adamw_bnb_8bit",
        "adamw_8bit",
        "ademamix",
        "ademamix_8bit",
        "lion_8bit",
        "lion_32bit",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
        "paged_ademamix_32bit",
        "paged_ademamix_8bit",
        "paged_lion_32bit",
        "paged_lion_8bit",
        "rmsprop_bnb",
        "rmsprop_bnb_8bit",
        "rmsprop_bnb_32bit",
    ),
    "galore_torch": (
        "galore_adamw",
        "galore_adamw_8bit",
        "galore_adafactor",
        "galore_adamw_layerwise",
        "galore_adamw_8bit_layerwise",
        "galore_adafactor_layerwise",
    ),
    "apollo_torch": ("apollo_adamw", "apollo_adamw_layerwise"),
    "lomo_optim": ("lomo", "adalomo"),
    "torchao": ("adamw_torch_4bit", "adamw_torch_8bit"),
    "schedulefree": ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
    "torch-optimi": ("stable_adamw",),
    "grokadamw": ("grokadamw",),
    "torchdistx": ("adamw_anyprecision",),
    "torch_npu": ("adamw_torch_npu_fused",),
}
_INSIDE = {  # these update inside the backward pass, or by layer: no optimizer step to guard
    *_LIBRARIES["lomo_optim"],
    *(name for names in _LIBRARIES.values() for name in names if name.endswith("layerwise")),
}
_REPLACED = {
    "adamw_torch_xla": (
        "torch_xla's own AdamW leaves out non-finite steps, which every optimizer does here.",
        "adamw_torch",
    ),
    "adamw_hf": ("transformers has removed it; torch's AdamW took its place.", "adamw_torch"),
    "adamw_apex_fused": ("torch has a fused AdamW of its own.", "adamw_torch_fused"),
}


def optimizer_class(
    name: str,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    options: Mapping[str, str] | None = None,
    fuses: bool = False,
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the named optimizer's class and its arguments, parameters apart.

    `options` are texts, as `parse_options` gives them. `fuses` says whether the device has fused
    updates: where it has none, "adamw_torch_fused" is the same AdamW updated piece by piece.
    """
    name = str(getattr(name, "value", name))
    if name not in _OPTIONS:
        raise _refused(name)
    given = _converted(name, options or {})
    adam = {"betas": (beta1, beta2), "eps": epsilon}
    if name == "adamw_torch_fused" and fuses:
        return torch.optim.AdamW, {"lr": learning_rate, **adam, "fused": True, **given}
    if name in ("adamw_torch", "adamw_torch_fused"):
        return torch.optim.AdamW, {"lr": learning_rate, **adam, **given}
    if name == "adafactor":
        own = given.get("relative_step", False)  # then it makes its own rate
        plain = {"lr": None if own else learning_rate, "scale_parameter": False}
        return Adafactor, {**plain, "relative_step": False, **given}
    return _PLAIN[name], {"lr": learning_rate, **given}


_PLAIN: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def names() -> tuple[str, ...]:
    """Return the names that `optimizer_class` builds."""
    return tuple(_OPTIONS)


def refused_names() -> tuple[str, ...]:
    """Return the names that are known and refused."""
    return (*(name for names in _LIBRARIES.values() for name in names), *_REPLACED)


def _refused(name: str) -> BadInput | Unsupported:
    """Return the error for a name that is not built: known elsewhere, replaced, or unknown."""
    what, known = f"Cannot build the optimizer {name!r}.", ", ".join(_OPTIONS)
    if name in _REPLACED:
        why, instead = _REPLACED[name]
        return Unsupported(what, why=why, fix=f"pass optim={instead!r}.")
    library = next((lib for lib, names in _LIBRARIES.items() if name in names), None)
    if library is None:
        near = nearest(name, _OPTIONS)
        fix = f"did you mean optim={near!r}?" if near else "take one of these."
        return BadInput(what, why=f"the optimizers are {known}.", fix=fix)
    why = _NEEDS.format(library=library)
    if name in _INSIDE:
        why += " It updates during the backward pass, where a step can't be left out."
        return Unsupported(what, why=why, fix=f"pass optim= one of {known}.")
    return Unsupported(what, why=why, fix=f"pass optim= one of {known}, or hand it over: {_OWN}.")


def _converted(name: str, options: Mapping[str, str]) -> dict[str, Any]:
    known = _OPTIONS[name]
    result = {}
    for key, text in options.items():
        if key == "weight_decay":
            raise BadInput(
                "Cannot take weight_decay among the optimizer's own options.",
                why="each parameter group has its decay already: weight_decay, and 0 for biases "
                "and norms.",
                fix="pass weight_decay as an argument of its own.",
            )
        if key not in known:
            raise _wrong_option(name, f"has no option {key!r}.")
        try:
            result[key] = known[key](text)
        except ValueError as error:
            kind = "true or false" if known[key] is _boolean else "a number"
            raise _wrong_option(name, f"cannot take {key}={text!r}: it is {kind}.") from error
    return result


def _wrong_option(name: str, what: str) -> BadInput:
    return BadInput(
        f"The optimizer {name!r} {what}",
        why=f"its options are {', '.join(_OPTIONS[name])}.",
        fix="correct optim_args.",
    )


def parse_options(text: str | None) -> dict[str, str]:
    """Return the options written as "key=value,key=value".

    >>> parse_options("momentum=0.9, nesterov=true")
    {'momentum': '0.9', 'nesterov': 'true'}
    """
    result: dict[str, str] = {}
    for piece in (text or "").replace(" ", "").split(",") if text else []:
        key, equals, value = piece.partition("=")
        if not (key and equals and value) or "=" in value or key in result:
            why = f"{key!r} is there twice." if key in result else f"{piece!r} is not key=value."
            raise BadInput(
                f"Cannot read the optimizer's options {text!r}.",
                why=why,
                fix='write them as "momentum=0.9,nesterov=true".',
            )
        result[key] = value
    return result


def decay_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay is for: no biases, no norms.

    A layer norm is known by its type, other norms by their names: `norm`, `..._norm`,
    `...layernorm...`, `...rmsnorm...`. A tied parameter is listed under each of its names.
    """
    return _decaying(model)


def _decaying(model: nn.Module) -> list[str]:
    return [name for name in _names(model, "") if not _NO_DECAY.search(name.lower())]


def _names(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if not isinstance(child, nn.LayerNorm):
            yield from _names(child, f"{prefix}{name}.")
    for name in module._parameters:
        yield prefix + name


def parameter_groups(
    model: nn.Module, weight_decay: float, decay_names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return two groups of the parameters that are trained: with weight decay, and without.

    `decay_names` are those of the first group; None takes the function's of that name.
    """
    chosen = set(_decaying(model) if decay_names is None else decay_names)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise BadInput(
            f"This {type(model).__name__} has nothing to train.",
            why="no parameter has requires_grad.",
            fix="unfreeze some of them: parameter.requires_grad_(True).",
        )
    return [
        {"params": [p for name, p in trained if name in chosen], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name not in chosen], "weight_decay": 0.0},
    ]
