"""Train faster on a processor: the same model, with other draws of dropout."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


def take(trainer: Any) -> None:
    """Choose what trains faster on a CPU, whatever the precision, and put it on record."""
    if trainer.accelerator.device.type != "cpu":
        return
    model, taken = trainer.model, ["quick dropout"]
    config = getattr(model, "config", None)
    drops = any(getattr(config, name, 0) for name in _ATTENTION_DROPOUT)
    if drops and getattr(config, "_attn_implementation", None) == "sdpa":
        # With dropout, torch's own attention leaves bf16 on a CPU and computes in float32.
        model.set_attn_implementation("eager")
        taken.append("eager attention")
    because = "faster on a CPU: the same model, with other draws of dropout"
    trainer._session.revise("kernels", ", ".join(taken), because)


def in_use(trainer: Any) -> AbstractContextManager[Any]:
    """Return what a training runs in that has taken them."""
    from anytrain.machine.backends.draws import quick_dropout

    return quick_dropout() if trainer.accelerator.device.type == "cpu" else nullcontext()
