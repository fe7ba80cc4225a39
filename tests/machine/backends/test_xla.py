"""torch_xla's choice and refusals; its runtime needs torch 2.9 and is not run here."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from anytrain.core.facts import Found, NotFound
from anytrain.core.plan import Wish, Wishes
from anytrain.machine.backends import xla
from anytrain.machine.backends.xla import Xla


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a torch_xla is installed that fits this torch."""
    fitting = ".".join(torch.__version__.split(".")[:2]) + ".0"
    monkeypatch.setattr(xla.metadata, "version", lambda name: fitting)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("pjrt", "chips", "automatic"),
    [
        ("TPU", (), True),
        ("TPU_C_API", (), True),
        ("CPU", ("TPU v5e",), False),
        (None, (), False),
        (None, ("TPU v5e",), True),
    ],
)
def test_only_a_real_tpu_behind_xla_is_taken_unasked(
    monkeypatch: pytest.MonkeyPatch, pjrt: str | None, chips: tuple[str, ...], automatic: bool
) -> None:
    monkeypatch.setattr(xla, "tpu_chips", lambda: chips)
    if pjrt is not None:
        monkeypatch.setenv("PJRT_DEVICE", pjrt)
    answer = Xla().probe()
    assert isinstance(answer, Found)
    assert answer.automatic is automatic


@pytest.mark.parametrize(("pjrt", "broken"), [("TPU", True), ("CPU", False)])
def test_a_torch_xla_for_another_torch_is_named_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, pjrt: str, broken: bool
) -> None:
    monkeypatch.setattr(xla.metadata, "version", lambda name: "1.13.0")
    monkeypatch.setenv("PJRT_DEVICE", pjrt)
    answer = Xla().probe()
    assert isinstance(answer, NotFound)
    assert answer.broken is broken
    assert f"torch_xla 1.13.0 needs torch 1.13, this is {torch.__version__}" in answer.because


def test_without_torch_xla_nothing_is_found_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(xla.metadata, "version", absent)
    assert Xla().probe() == NotFound("torch_xla is not installed")


@pytest.mark.parametrize(("value", "set_"), [("true", True), ("1", True), ("no", False)])
def test_downcasting_is_asked_for_before_the_runtime_loads(value: str, set_: bool) -> None:
    told = Xla().launch_environment(1, Wishes(downcast_bf16=Wish(value, "argument")))
    assert told == ({"XLA_DOWNCAST_BF16": "1"} if set_ else {})
    assert Xla().launch_environment(1, Wishes()) == {}
