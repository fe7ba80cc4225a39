"""torch_xla's bfloat16 variables: what they do to a graph, to a run, and to what it logs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from anytrain.core import environment
from launching import child_environment, run_command, run_script
from xla_runs import train

RUNS = Path(__file__).parents[1] / "xla_runs.py"
_DOTS = """
import torch
import torch_xla
device = torch_xla.device()
narrow = torch.ones(4, 4, device=device)
wide = torch.ones(4, 4, device=device, dtype=torch.float64)
assert (narrow.dtype, wide.dtype) == (torch.float32, torch.float64)
text = torch_xla._XLAC._get_xla_tensors_hlo([narrow @ narrow, wide @ wide])
print([line.split("= ")[1].split("[")[0] for line in text.splitlines() if " dot(" in line])
"""


def _run(out: Path, env: dict[str, str], **told: Any) -> dict[str, Any]:
    ran = run_command(
        [sys.executable, RUNS, out, json.dumps(told)],
        env=child_environment({"PJRT_DEVICE": "CPU", "ANYTRAIN_DEVICE": "xla", **env}),
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"losses"')]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.mark.parametrize(
    ("variable", "value", "dtypes"),
    [
        ("UNRELATED", "1", ["f32", "f64"]),
        ("XLA_DOWNCAST_BF16", "1", ["bf16", "f32"]),
        ("XLA_USE_BF16", "true", ["bf16", "bf16"]),
        ("XLA_USE_BF16", "yes", ["f32", "f64"]),
    ],
)
def test_the_variables_narrow_what_the_compiler_is_given(
    variable: str, value: str, dtypes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run_script(_DOTS, env={variable: value, "PJRT_DEVICE": "CPU"})
    assert str(dtypes) in told.stdout.splitlines()
    monkeypatch.setenv(variable, value)
    assert (environment.narrowing() != ()) == ("bf16" in dtypes)


@pytest.mark.parametrize("variable", ["XLA_DOWNCAST_BF16", "XLA_USE_BF16"])
def test_a_narrowed_run_learns_and_adds_its_losses_up_exactly(
    tmp_path: Path, variable: str
) -> None:
    plain = train(tmp_path / "plain", use_cpu=True)
    told = _run(tmp_path / "narrow", {variable: "1"})
    assert variable in told["plan"]["precision"][1]
    assert told["plan"]["guard"][0] == "host"
    assert told["losses"] == pytest.approx(plain.losses, abs=2e-2)
    assert told["eval_losses"] == pytest.approx(plain.eval_losses, abs=2e-2)
    # Three losses of bfloat16, 8 bits each, have a mean that bfloat16 does not have.
    assert any((loss * 2**9) % 1 for loss in told["losses"][:-1])
