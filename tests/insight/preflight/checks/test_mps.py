"""What mps lacks: kernels, shapes and number types."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anytrain.insight.preflight.checks import dtypes, kernels
from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.mps import conditions
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Op, SourcePlace, TensorFacts
from made_traces import CPU, CUDA, LINE, MPS, TPU, op, trace

OLD = Target("mps", "mps", None, "2.13.0")
NEW = Target("mps", "mps", None, "2.15.0")


def facts(*shape: int, dtype: str = "float32", device: str = "mps") -> TensorFacts:
    return TensorFacts(dtype, shape, device)


def shaped(name: str, inputs: list[TensorFacts], outputs: list[TensorFacts], **more: object) -> Op:
    return op(name, inputs=tuple(inputs), outputs=tuple(outputs), **more)


def lacks(*ops: Op, target: Target = OLD, **job: object) -> list[Finding]:
    return list(kernels.check(trace(*ops, **job), target))


def test_an_op_without_a_kernel_is_an_error_at_its_line() -> None:
    (found,) = lacks(op("_linalg_eigh", calls=3))
    assert (found.severity, found.certain, found.per_step) == ("error", True, 3)
    assert found.what == "_linalg_eigh has no kernel on mps."
    assert found.place == LINE
    assert "eigh(x.cpu())" in found.fix


@pytest.mark.parametrize("target", [CPU, CUDA, TPU])
def test_other_devices_are_not_asked(target: Target) -> None:
    assert lacks(op("_linalg_eigh"), target=target) == []


def test_what_has_a_kernel_or_is_composed_is_not_told() -> None:
    assert lacks(op("add.Tensor"), op("convolution"), op("aten_has_no_such_op"), target=MPS) == []


def test_what_stays_on_the_cpu_is_not_told() -> None:
    on_cpu = facts(2, 2, device="cpu")
    assert lacks(shaped("_linalg_eigh", [on_cpu], [on_cpu])) == []


def test_the_version_of_torch_on_the_target_decides() -> None:
    assert lacks(op("_linalg_svd")) != []
    assert lacks(op("_linalg_svd"), target=NEW) == []


def test_the_same_op_in_many_modules_of_a_line_is_one_finding() -> None:
    layers = [replace(LINE, module=f"encoder.layer.{n}") for n in range(12)]
    (found,) = lacks(*(op("_linalg_eigh", place=place) for place in layers))
    assert found.per_step == 12


def test_the_fallback_makes_it_a_warning_that_names_its_price() -> None:
    ins, outs = [facts(4, 4), facts(4)], [facts(4, 4)]
    (found,) = lacks(shaped("_linalg_eigh", ins, outs, calls=2), mps_fallback=True)
    assert found.severity == "warning"
    assert "round trip to the host (2 in a training step), with 2 tensors copied there and 1" in (
        found.why
    )


def test_a_step_of_training_and_one_of_evaluation_are_counted_apart() -> None:
    (found,) = lacks(op("_linalg_eigh"), op("_linalg_eigh", phase="evaluate"))
    assert found.per_step == 1
    assert "(1 in a training step and 1 in an evaluation step)" in found.why
    wide = shaped("linspace", [], [facts(8, dtype="float64")])
    (found,) = dtypes.check(trace(wide, replace(wide, phase="evaluate")), OLD)
    assert found.per_step == 1


def test_without_the_fallback_the_error_says_what_it_would_do() -> None:
    (found,) = lacks(op("_linalg_eigh"))
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1, set before torch is loaded, sends it" in found.why
    assert "Each call is a round trip" in found.why


def test_the_fallback_cannot_rescue_what_the_cpu_lacks_too() -> None:
    (found,) = lacks(op("_thnn_fused_lstm_cell"), mps_fallback=True)
    assert found.severity == "error"
    assert "the CPU has no kernel for it either" in found.why
    assert "FALLBACK" not in found.fix


def test_the_fallback_cannot_rescue_a_result_in_float64() -> None:
    wide = shaped("_linalg_eigh", [facts(2, 2)], [facts(2, dtype="float64")])
    (found,) = lacks(wide, mps_fallback=True)
    assert found.severity == "error"
    assert "float64" in found.why


def test_a_composed_op_tells_what_it_is_written_with() -> None:
    (found,) = lacks(op("put"))
    assert "written with put_" in found.why


def test_what_torch_itself_sends_to_the_cpu_works_and_costs() -> None:
    (found,) = lacks(op("embedding_renorm_"))
    assert (found.severity, found.certain) == ("warning", True)
    assert found.what == "embedding_renorm_ runs on the CPU."
    assert "max_norm" in found.fix


def test_backward_and_evaluation_are_named() -> None:
    (backward,) = lacks(op("_adaptive_avg_pool3d_backward", phase="backward"))
    assert "met in backward" in backward.why
    (evaluation,) = lacks(op("_linalg_eigh", phase="evaluate"))
    assert evaluation.per_step == 0
    assert "an evaluation step" in evaluation.why


def test_a_choice_made_for_the_tracing_machine_is_no_finding() -> None:
    assert lacks(op("_scaled_dot_product_flash_attention_for_cpu")) == []


def test_pinv_is_judged_by_what_it_computes_inside() -> None:
    name = "linalg_pinv.atol_rtol_tensor"
    (symmetric,) = lacks(op(name, settings=(("hermitian", True),)))
    assert symmetric.what == f"_linalg_eigh (in {name}) has no kernel on mps."
    (general,) = lacks(op(name))
    assert general.severity == "warning"
    assert lacks(op(name), target=NEW) == []


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [((8, 8), (4, 4), 0), ((8, 8), (3, 3), 1), ((2, 2), (4, 4), 0), ((8, 2), (4, 4), 1)],
)
def test_uneven_adaptive_pooling_may_fail(
    before: tuple[int, int], after: tuple[int, int], fails: int
) -> None:
    small, large = facts(1, 3, *after), facts(1, 3, *before)
    forward = shaped("_adaptive_avg_pool2d", [large], [small])
    backward = shaped("_adaptive_avg_pool2d_backward", [small, large], [large], phase="backward")
    found = lacks(forward, backward)
    assert len(found) == 2 * fails
    assert all((f.severity, f.certain) == ("warning", False) for f in found)
    assert all("does not help" in f.why for f in found)


def test_adaptive_max_pooling_may_fail_only_if_it_grows_and_shrinks() -> None:
    def pool(*after: int) -> Op:
        return shaped("adaptive_max_pool2d", [facts(1, 3, 8, 8)], [facts(1, 3, *after)])

    assert lacks(pool(3, 3)) == []
    assert len(lacks(pool(3, 9))) == 1


@pytest.mark.parametrize(
    "made",
    [
        shaped("convolution", [facts(1, 1, 70000)], [facts(1, 1, 70000)]),
        shaped("convolution", [facts(1, 1, 9, dtype="int64")], [facts(1, 1, 9, dtype="int64")]),
        shaped("add.Tensor", [facts(2**16, 2**16)], [facts(1)]),
        shaped("add.Tensor", [facts(*[1] * 17)], [facts(1)]),
    ],
)
def test_sizes_and_types_that_a_kernel_refuses_may_fail(made: Op) -> None:
    (found,) = lacks(made)
    assert found.certain is False


def test_every_condition_and_every_advice_is_a_sentence() -> None:
    for condition in conditions.CONDITIONS:
        assert all(text.endswith(".") for text in (condition.what, condition.why, condition.fix))
    for name in conditions._INSTEAD:
        assert conditions.advice(name).endswith(".")


def wide(*ops: Op, target: Target = OLD) -> list[Finding]:
    return list(dtypes.check(trace(*ops), target))


@pytest.mark.parametrize(("dtype", "other"), [("float64", "float32"), ("complex128", "complex64")])
def test_64_bits_are_an_error_on_mps(dtype: str, other: str) -> None:
    (found,) = wide(op("linspace", dtype=dtype))
    assert (found.severity, found.place, found.per_step) == ("error", LINE, 1)
    assert f"dtype=torch.{other}" in found.fix


def test_64_bits_are_told_once_for_a_line() -> None:
    (found,) = wide(op("linspace", dtype="float64"), op("mul.Tensor", dtype="float64", calls=2))
    assert (found.per_step, "linspace" in found.what) == (3, True)


def test_64_bits_on_the_cpu_and_on_cuda_are_fine() -> None:
    on_cpu = facts(2, dtype="float64", device="cpu")
    assert wide(shaped("linspace", [], [on_cpu])) == []
    assert (
        wide(shaped("linspace", [], [facts(2, dtype="float64", device="cuda")]), target=CUDA) == []
    )


def test_64_bits_are_slow_on_a_tpu() -> None:
    (found,) = wide(shaped("linspace", [], [facts(2, dtype="float64", device="tpu")]), target=TPU)
    assert found.severity == "warning"


def test_the_tolerance_of_a_decomposition_is_no_finding() -> None:
    rank = shaped("_linalg_svd", [facts(5, 4, 4)], [facts(5, 4)])
    tolerance = shaped("full", [], [facts(dtype="float64")])
    each = shaped("mul.Tensor", [facts(5, 1)], [facts(5, 1, dtype="float64")])
    assert wide(rank, tolerance, each) == []
    assert len(wide(rank, shaped("ones", [], [facts(5, 4, 4, dtype="float64")]))) == 1
    assert len(wide(tolerance)) == 1


def test_64_bits_in_backward_alone_are_a_note() -> None:
    other = SourcePlace("", "model.py", 3)
    accumulated = op("sum.dim_IntList", dtype="float64", phase="backward", place=other)
    (found,) = wide(accumulated)
    assert (found.severity, found.certain) == ("note", False)
    assert [f.severity for f in wide(accumulated, op("linspace", dtype="float64"))] == ["error"] * 2


def test_types_that_are_served_in_part_are_a_note_each() -> None:
    found = wide(op("mul.Tensor", dtype="complex64"), op("mul.Tensor", dtype="bfloat16"))
    assert [f.severity for f in found] == ["note", "note"]
    assert wide(op("mul.Tensor", dtype="bfloat16"), target=CUDA) == []
