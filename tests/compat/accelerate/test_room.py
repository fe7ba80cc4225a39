"""A script for HF Accelerate runs with its import lines changed, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import anytrain
from anytrain.compat.accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from anytrain.compat.accelerate.hooks import ModelHook, remove_hook_from_module
from anytrain.compat.accelerate.local_sgd import LocalSGD
from anytrain.compat.accelerate.optimizer import AcceleratedOptimizer, move_to_device
from anytrain.compat.accelerate.scheduler import AcceleratedScheduler
from anytrain.compat.accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from anytrain.compat.accelerate.utils import DeepSpeedPlugin
from anytrain.core.errors import BadInput, Notice, Unsupported
from launching import launch, run_script

# Written for HF Accelerate: only the lines that start with "from accelerate" may change.
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import skip_first_batches
from accelerate.local_sgd import LocalSGD
from accelerate.logging import get_logger
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    GradientAccumulationPlugin, ProjectConfiguration, gather_object, is_deepspeed_available,
    set_seed, tqdm,
)

set_seed(42)
logger = get_logger(__name__)
accelerator = Accelerator(gradient_accumulation_steps=2)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
train, valid = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
model, optimizer, train, valid, schedule = accelerator.prepare(
    model, optimizer, train, valid, schedule
)
assert isinstance(schedule, AcceleratedScheduler) and not is_deepspeed_available()
assert accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
for epoch in range(2):
    for x, y in tqdm(train, disable=True):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
    for x, y in train:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        local.step()
seen = sum(len(accelerator.gather_for_metrics(y)) for _, y in valid)
ranks = gather_object([PartialState().process_index])
logger.info("done", main_process_only=False)
accelerator.print(seen, ranks, GradientState().num_steps, AcceleratorState().mixed_precision)
accelerator.end_training()
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_script_runs_when_only_its_imports_change(num_processes: int) -> None:
    script = SCRIPT.replace("from accelerate", "from anytrain.compat.accelerate")
    env = {"ANYTRAIN_DEVICE": "cpu"}
    told = run_script(script, env=env) if num_processes == 1 else launch(script, 2, env=env)
    assert told.stdout.split("\n")[-2] == f"48 {list(range(num_processes))} 2 no"


def test_the_room_loads_no_accelerate() -> None:
    check = (
        "import sys, anytrain.compat.accelerate.utils; "
        "sys.exit(bool({'accelerate', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_its_accelerator_is_ours() -> None:
    assert issubclass(Accelerator, anytrain.Accelerator)
    handler = DistributedDataParallelKwargs(bucket_cap_mb=13, comm_hook="fp16")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    assert accelerator.ddp_handler is handler
    assert accelerator._run.options.ddp == {"bucket_cap_mb": 13, "comm_hook": "fp16"}
    assert handler.to_dict()["bucket_cap_mb"] == 13
    assert "comm_hook" not in handler.to_dict()


def test_optimizers_and_schedulers_can_be_made_by_hand() -> None:
    Accelerator(cpu=True)
    layer = nn.Linear(2, 1)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5**step)
    scheduler = AcceleratedScheduler(schedule, optimizer)
    layer(torch.ones(1, 2)).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    scheduler.step()
    assert not torch.equal(before, layer.weight)
    assert scheduler.get_last_lr() == [0.5]
    assert move_to_device({"a": [before]}, torch.device("cpu"))["a"][0].equal(before)


def test_averaging_locally_takes_an_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    with LocalSGD(accelerator=accelerator, model=nn.Linear(1, 1), local_sgd_steps=2) as local:
        local.step()


def test_joining_where_it_cannot_be_is_said() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = "XLA"
    with pytest.warns(Notice, match="only supported for multi-GPU"):  # noqa: SIM117 -- two things
        with accelerator.join_uneven_inputs([]):
            pass


def test_a_quantized_model_that_is_not_all_on_the_device_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.is_loaded_in_8bit, model.hf_device_map = True, {"": "cpu"}
    with pytest.raises(BadInput, match="CPU or disk offload"):
        Accelerator(cpu=True).prepare(model)


def test_a_refused_class_may_be_named_and_inherited_but_not_made() -> None:
    class Hook(ModelHook):
        pass

    assert not isinstance(nn.Linear(1, 1), ModelHook)
    with pytest.raises(Unsupported, match="Hook"):
        Hook()
    with pytest.raises(Unsupported, match="DeepSpeedPlugin"):
        DeepSpeedPlugin(zero_stage=2)


def test_empty_weights_have_shapes_and_no_values() -> None:
    with init_empty_weights():
        model = nn.BatchNorm1d(3)
    assert model.weight.is_meta
    assert not model.running_mean.is_meta
    with init_empty_weights(include_buffers=True):
        assert nn.BatchNorm1d(3).running_mean.is_meta
    with init_on_device("cpu"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    assert not nn.Linear(2, 2).weight.is_meta


def test_empty_weights_are_filled_from_a_file(tmp_path) -> None:
    source = nn.Linear(3, 2)
    Accelerator(cpu=True).save_model(source, tmp_path)
    with init_empty_weights():
        model = nn.Linear(3, 2)
    model = load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
    assert torch.equal(model.weight, source.weight)
    with pytest.raises(Unsupported, match="device_map"):
        load_checkpoint_and_dispatch(model, tmp_path, device_map="auto")


def test_hooks_of_another_loader_are_taken_off() -> None:
    layer = nn.Linear(1, 1)

    class Held:
        def detach_hook(self, module: nn.Module) -> None:
            module.detached = True

    layer._hf_hook, layer._old_forward = Held(), layer.forward
    layer.forward = None
    assert remove_hook_from_module(layer, recurse=True) is layer
    assert layer.detached
    assert layer(torch.ones(1, 1)).shape == (1, 1)


class Notes(GeneralTracker):
    name = "notes"
    requires_logging_directory = False
    tracker = None

    @on_main_process
    def log(self, values, step=None, **kwargs):
        return values


def test_a_tracker_of_ones_own_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in dict(LOGGER_TYPE_TO_CLASS).items():
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notes", Notes)
    register_tracker_class(Notes)
    assert "notes" in get_available_trackers()
    assert filter_trackers("notes") == ["notes"]
    assert Notes().log({"a": 1}) == {"a": 1}
    again = type("Again", (Notes,), {})
    with pytest.warns(Notice, match="notes"):
        register_tracker_class(again)
    with pytest.raises(BadInput):
        register_tracker_class(dict)
