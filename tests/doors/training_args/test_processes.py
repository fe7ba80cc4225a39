"""What arguments know of the device and the ranks, and what they ask of a session."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from anytrain.core.errors import BadInput, Unsupported
from anytrain.doors.accelerator.options import DistributedType
from anytrain.doors.training_args import ParallelMode, TrainingArguments, session as sessions
from launching import launch


def test_the_device_is_the_best_of_the_machine() -> None:
    from anytrain.machine.backends import probe

    args = TrainingArguments("out")
    assert args.device.type == probe.choose(None).device(0).type
    assert TrainingArguments("out", use_cpu=True).device.type == "cpu"


def test_one_process_knows_that_it_is_alone() -> None:
    args = TrainingArguments("out", use_cpu=True)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.n_gpu, args.parallel_mode) == (0, ParallelMode.NOT_PARALLEL)
    assert args.should_log
    assert args.should_save
    assert args.place_model_on_device is None
    assert (args.train_batch_size, args.eval_batch_size) == (8, 8)
    assert args.ddp_timeout_delta == timedelta(minutes=30)
    with args.main_process_first(local=False, desc="reading"):
        pass


def test_a_precision_that_the_device_cannot_do_is_refused_by_the_plan() -> None:
    args = TrainingArguments("out", use_cpu=True, fp16=True)
    with pytest.raises(BadInput, match="fp16 on 'cpu'"):
        _ = args.device


def test_the_log_level_follows_the_rank() -> None:
    args = TrainingArguments("out", log_level="error", use_cpu=True)
    assert args.get_process_log_level() == logging.ERROR
    passive = TrainingArguments("out", use_cpu=True)
    assert passive.get_process_log_level() == logging.getLogger("anytrain").getEffectiveLevel()
    transformers = pytest.importorskip("transformers")
    before = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_info()
        assert passive.get_process_log_level() == logging.INFO
    finally:
        transformers.logging.set_verbosity(before)


@pytest.mark.parametrize(("asked", "steps"), [(0, 0), (10, 10), (0.1, 10), (0.999, 100), (1, 1)])
def test_a_warm_up_below_one_is_a_share(asked: float, steps: int) -> None:
    assert TrainingArguments("out", warmup_steps=asked).get_warmup_steps(100) == steps


@pytest.mark.parametrize(
    ("given", "precision", "source"),
    [
        ({"bf16": True}, "bf16", "argument bf16"),
        ({"fp16": True}, "fp16", "argument fp16"),
        ({"precision": "auto"}, "auto", "argument precision"),
    ],
)
def test_a_precision_is_a_wish_in_either_spelling(
    given: dict[str, Any], precision: str, source: str
) -> None:
    args = TrainingArguments("out", **given)
    wish = sessions.wishes(args).precision
    assert wish is not None
    assert (wish.value, wish.source) == (precision, source)
    assert args.mixed_precision == precision


def test_what_is_not_asked_for_is_no_wish() -> None:
    wishes = sessions.wishes(TrainingArguments("out"))
    assert (wishes.device, wishes.precision, wishes.compile, wishes.accumulation) == (None,) * 4
    assert TrainingArguments("out").mixed_precision == "no"


def test_the_environment_is_heard_where_arguments_are_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert TrainingArguments("out").mixed_precision == "bf16"
    assert TrainingArguments("out", fp16=True).mixed_precision == "fp16"


def test_options_reach_the_loaders_ddp_and_the_compiler() -> None:
    args = TrainingArguments(
        "out",
        data_seed=7,
        accelerator_config={"split_batches": True, "even_batches": False},
        ddp_bucket_cap_mb=10,
        ddp_backend="gloo",
        torch_compile_mode="reduce-overhead",
        use_cpu=True,
    )
    options = sessions.run_options(args)
    assert (options.loaders.split_batches, options.loaders.even_batches) == (True, False)
    assert (options.loaders.data_seed, options.loaders.use_seedable_sampler) == (7, True)
    assert options.ddp == {"find_unused_parameters": True, "bucket_cap_mb": 10}
    assert options.compile == {"backend": "inductor", "mode": "reduce-overhead"}
    assert sessions.session_options(args).process_group["backend"] == "gloo"
    wished = sessions.wishes(args)
    assert wished.device is not None
    assert wished.compile is not None
    assert (wished.device.value, wished.compile.value) == ("cpu", "inductor")


def test_the_data_follow_the_seed_where_they_have_none() -> None:
    assert sessions.run_options(TrainingArguments("out", seed=5)).loaders.data_seed == 5


def test_gradient_checkpointing_looks_for_no_unused_parameters() -> None:
    options = sessions.run_options(TrainingArguments("out", gradient_checkpointing=True))
    assert options.ddp == {"find_unused_parameters": False}


def test_accumulation_can_be_told_in_the_accelerator_config() -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 4, "sync_each_batch": True}}
    args = TrainingArguments("out", accelerator_config=config)
    assert args.gradient_accumulation_steps == 4
    assert sessions.session_options(args).accumulation.sync_each_batch


def test_a_run_with_what_another_object_was_made_with_is_refused_and_its_arguments_are_not() -> (
    None
):
    args = TrainingArguments("out", accelerator_config={"use_configured_state": True})
    assert args.parallel_mode == ParallelMode.NOT_PARALLEL
    with pytest.raises(Unsupported, match="use_configured_state"):
        sessions.run_options(args)


def test_accumulation_told_twice_is_refused() -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    with pytest.raises(BadInput, match="`num_steps` is set but"):
        TrainingArguments("out", gradient_accumulation_steps=2, accelerator_config=config)


def test_each_run_opens_a_session_of_its_own_and_the_arguments_read_the_last() -> None:
    args = TrainingArguments("out", use_cpu=True)
    first, second = sessions.open_session(args), sessions.open_session(args)
    assert first is not second
    assert sessions.kept_session(args) is second
    args.bf16 = True
    assert sessions.kept_session(args).plan.precision.value == "bf16"


def test_two_ranks_know_each_other_and_take_turns() -> None:
    script = """
    import sys, time
    from pathlib import Path
    from anytrain.core.errors import Unsupported
    from anytrain.doors.training_args import TrainingArguments
    args = TrainingArguments("out", use_cpu=True, log_level_replica="error", use_mps_device=True)
    file = Path(sys.argv[1])
    with args.main_process_first(desc="writing"):
        if args.process_index == 0:
            time.sleep(0.2)
            file.write_text("done")
        seen = file.exists()
    try:
        TrainingArguments("out", average_tokens_across_devices=False)
        refused = False
    except Unsupported:
        refused = True
    told = [args.process_index, args.world_size, args.local_rank, args.parallel_mode.value]
    told += [args.should_save, args.get_process_log_level() == 40, seen, refused]
    sys.stdout.write(" ".join(["told", *map(str, told)]) + "\\n")  # in one: ranks' lines mix
    """
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        told = launch(script, 2, Path(folder) / "file")
    lines = sorted(line for line in told.stdout.splitlines() if line.startswith("told"))
    assert lines == [
        "told 0 2 0 distributed True False True True",
        "told 1 2 1 distributed False True True True",
    ]
    assert told.stderr.count("use_mps_device=True changes nothing") == 1


def test_where_a_process_stands_goes_by_hfs_names(tmp_path) -> None:
    args = TrainingArguments(str(tmp_path))
    state = args.distributed_state
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert not state.use_distributed
    assert state.distributed_type == DistributedType.NO == "NO"
    assert state.distributed_type not in ["MULTI_GPU", "DEEPSPEED"]
    assert state.backend is None
    assert state.device == args.device == args._setup_devices
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        pass
