"""Adam and AdamW in one launch, with the gradients' norm and their scaling in another.

torch's own need a pass over all gradients for each question: are they finite, how long are they,
scale them, then update. Here one pass measures, and the update scales as it reads. Gradients may be
in bfloat16, as the backward pass leaves them.
"""

from __future__ import annotations

from typing import Any

import torch

from anytrain.fast.kernels.step import ROW, Kernels, chunks_of

_ALIGNED = 16
_KINDS = {torch.float32: 0, torch.bfloat16: 1}


def fits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernels compute what this optimizer would."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return all(
        not (group["amsgrad"] or group["maximize"] or group.get("differentiable"))
        and not any(isinstance(beta, torch.Tensor) for beta in group["betas"])
        and _is_readable(group["lr"])
        and all(_is_plain(parameter) for parameter in group["params"])
        for group in optimizer.param_groups
    )


def _is_readable(rate: Any) -> bool:
    """Whether the kernels can read a rate: a number, or one of the device's own float32 values."""
    return not isinstance(rate, torch.Tensor) or (rate.is_cuda and rate.dtype == torch.float32)


def _is_plain(parameter: torch.Tensor) -> bool:
    return (
        parameter.dtype == torch.float32
        and parameter.is_cuda
        and parameter.is_contiguous()
        and parameter.data_ptr() % _ALIGNED == 0
    )


class FusedAdam:
    """The measuring and the update of one recording.

    Where its gradients lie is known once the backward pass is recorded: `measure` notes it, and
    `settle` writes it down for the kernels before the first replay.
    """

    def __init__(self, kernels: Kernels, optimizer: torch.optim.Optimizer) -> None:
        self._kernels, self._optimizer = kernels, optimizer
        groups = optimizer.param_groups
        self.parameters = [
            (parameter, number)
            for number, group in enumerate(groups)
            for parameter in group["params"]
            if parameter in optimizer.state
        ]
        device = self.parameters[0][0].device
        self._rows = torch.zeros(len(self.parameters), ROW, dtype=torch.int64, device=device)
        self._chunks = chunks_of([p.numel() for p, _ in self.parameters], device)
        self._sums = torch.zeros(len(self._chunks), device=device)
        self._result = torch.zeros(2, device=device)
        self._found = torch.zeros(len(self.parameters), 4, device=device)
        self._unused = torch.zeros((), device=device)
        self._groups = torch.tensor([_settings(group) for group in groups], dtype=torch.float64)
        self._groups = self._groups.to(device)
        self._rates = torch.tensor([_address(group["lr"]) for group in groups]).to(device)
        self._gradients: list[torch.Tensor | None] = []

    def knows_all(self) -> bool:
        """Whether each parameter that has a gradient has a state, too: some get one later."""
        known = {id(parameter) for parameter, _ in self.parameters}
        held = (p for group in self._optimizer.param_groups for p in group["params"])
        return all(p.grad is None or id(p) in known for p in held)

    def measure(self, gradients: list[torch.Tensor | None], bound: float) -> torch.Tensor:
        """Return the gradients' norm; the update keeps it within the bound, if that is not 0."""
        self._gradients = gradients
        blocks = len(self._chunks)
        self._kernels.launch("squares", (blocks, 1), [self._rows, self._chunks, self._sums])
        self._kernels.launch("norm", (1, 1), [self._sums, blocks, float(bound), self._result])
        return self._result[0].clone()

    def update(self, skipped: torch.Tensor) -> None:
        """Update every parameter that has a gradient, unless `skipped` is 1."""
        launch, rows, groups = self._kernels.launch, self._rows, self._groups
        count = len(self.parameters)
        blocks = -(-count // 256)
        launch("rates", (blocks, 1), [rows, count, groups, self._rates, self._found])
        scale = self._result[1:]
        launch(
            "adam",
            (len(self._chunks), 1),
            [rows, self._chunks, groups, self._found, scale, skipped],
        )
        launch("count", (blocks, 1), [rows, count, skipped])

    def settle(self) -> None:
        """Tell the kernels where everything lies; nothing, if no gradient was measured."""
        if not self._gradients:
            return
        rows = []
        for (parameter, group), gradient in zip(self.parameters, self._gradients, strict=True):
            state: dict[str, Any] = self._optimizer.state[parameter]
            if gradient is None:  # nothing to do for it: a tensor without a value
                rows.append([0, 0, 0, 0, self._unused.data_ptr(), 0, group, 0])
                continue
            rows.append(
                [
                    parameter.data_ptr(),
                    gradient.data_ptr(),
                    state["exp_avg"].data_ptr(),
                    state["exp_avg_sq"].data_ptr(),
                    state["step"].data_ptr(),
                    parameter.numel(),
                    group,
                    _KINDS[gradient.dtype],
                ]
            )
        self._rows.copy_(torch.tensor(rows, dtype=torch.int64))
        self._gradients = []


def can_read(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether the kernels can take a gradient as it lies."""
    return (
        gradient.layout == torch.strided
        and gradient.is_contiguous()
        and gradient.shape == parameter.shape
        and gradient.dtype in _KINDS
        and gradient.data_ptr() % _ALIGNED == 0
    )


def _settings(group: dict[str, Any]) -> list[float]:
    beta1, beta2 = group["betas"]
    rate = 0.0 if isinstance(group["lr"], torch.Tensor) else group["lr"]
    decoupled = float(bool(group.get("decoupled_weight_decay")))
    return [float(v) for v in (beta1, beta2, group["eps"], group["weight_decay"], decoupled, rate)]


def _address(rate: Any) -> int:
    return rate.data_ptr() if isinstance(rate, torch.Tensor) and rate.is_cuda else 0
