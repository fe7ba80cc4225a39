"""The laws of a World, the same for one process, for two, and for a GPU's transport.

This file is also the script that each rank runs: it tries every law and prints what came out.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch

LAWS = {}


def law(function):
    LAWS[function.__name__] = function
    return function


@law
def ranks_are_counted_from_zero(world, device):
    assert world.gather_object(world.rank) == list(range(world.size))
    assert 0 <= world.local_rank < world.local_size <= world.size


@law
def gather_joins_along_the_first_dimension_in_rank_order(world, device):
    mine = torch.full((2, 3), float(world.rank), device=device)
    joined = world.gather(mine)
    assert joined.shape == (2 * world.size, 3)
    assert joined[:, 0].tolist() == [float(r) for r in range(world.size) for _ in range(2)]


@law
def gather_makes_one_element_of_a_scalar(world, device):
    joined = world.gather(torch.tensor(world.rank, device=device))
    assert joined.tolist() == list(range(world.size))


@law
def gather_carries_every_dtype(world, device):
    dtypes = [torch.bool, torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.int64]
    for dtype in [*dtypes, torch.float64, torch.complex64, torch.float8_e4m3fn]:
        mine = torch.tensor([1, 0], device=device).to(dtype)
        joined = world.gather(mine)
        assert joined.dtype is dtype, dtype
        assert joined.to(torch.complex64).real.tolist() == [1.0, 0.0] * world.size, dtype


@law
def gather_takes_tensors_that_are_not_contiguous(world, device):
    mine = torch.arange(6, device=device).reshape(2, 3).t() + world.rank
    expected = torch.cat([mine - world.rank + r for r in range(world.size)])
    assert torch.equal(world.gather(mine), expected)


@law
def gather_keeps_the_shape_of_nothing(world, device):
    assert world.gather(torch.empty(0, 5, device=device)).shape == (0, 5)


@law
def results_are_where_the_input_was(world, device):
    for where in (device, torch.device("cpu")):
        mine = torch.ones(2, device=where)
        assert world.gather(mine).device.type == where.type
        assert world.reduce(mine, "sum").device.type == where.type
        assert world.broadcast(mine).device.type == where.type


@law
def reduce_sums_means_and_takes_the_maximum(world, device):
    mine = torch.tensor([1.0, world.rank], device=device)
    last = world.size - 1
    assert world.reduce(mine, "sum").tolist() == [world.size, sum(range(world.size))]
    assert world.reduce(mine, "mean").tolist() == [1.0, last / 2]
    assert world.reduce(mine, "max").tolist() == [1.0, last]


@law
def reduce_leaves_its_input_alone(world, device):
    mine = torch.tensor([1.0, 2.0], device=device)
    world.reduce(mine, "sum").add_(5)
    assert mine.tolist() == [1.0, 2.0]


@law
def reduce_keeps_the_dtype_of_numbers(world, device):
    for dtype in (torch.bfloat16, torch.float16, torch.int16, torch.int32, torch.float64):
        mine = torch.tensor([3, 4], device=device).to(dtype)
        summed = world.reduce(mine, "sum")
        assert summed.dtype is dtype, dtype
        assert summed.tolist() == [3 * world.size, 4 * world.size], dtype
        assert world.reduce(mine, "max").dtype is dtype, dtype


@law
def the_mean_of_whole_numbers_is_a_float(world, device):
    mean = world.reduce(torch.tensor([world.rank, 2], device=device), "mean")
    assert mean.is_floating_point()
    assert mean.tolist() == [(world.size - 1) / 2, 2.0]


@law
def booleans_are_counted(world, device):
    mine = torch.tensor([True, world.rank == 0], device=device)
    counted = world.reduce(mine, "sum")
    assert counted.dtype is torch.int64
    assert counted.tolist() == [world.size, 1]
    assert world.reduce(mine, "max").tolist() == [True, True]
    assert world.reduce(mine, "mean").tolist() == [1.0, 1 / world.size]


@law
def reduce_takes_scalars_and_views(world, device):
    assert world.reduce(torch.tensor(2.0, device=device), "sum").item() == 2.0 * world.size
    view = torch.arange(4.0, device=device).reshape(2, 2).t()
    assert torch.equal(world.reduce(view, "mean"), view)


@law
def broadcast_gives_everyone_the_sources_tensor(world, device):
    source = world.size - 1
    mine = torch.tensor([world.rank, 7], device=device)
    assert world.broadcast(mine, source).tolist() == [source, 7]
    view = (torch.arange(6, device=device).reshape(2, 3) + world.rank).t()
    assert torch.equal(world.broadcast(view), view - world.rank)
    flags = torch.tensor([world.rank == 0, True], device=device)
    assert world.broadcast(flags).tolist() == [True, True]


@law
def objects_travel_whole(world, device):
    mine = {"rank": world.rank, "set": {1, (2, 3)}, "none": None}
    everyone = world.gather_object(mine)
    assert [each["rank"] for each in everyone] == list(range(world.size))
    assert everyone[-1]["set"] == {1, (2, 3)}
    source = world.size - 1
    assert world.broadcast_object(f"from {world.rank}", source) == f"from {source}"


@law
def the_board_is_read_by_all_and_never_waits(world, device):
    assert world.board.read("nobody wrote this") is None
    world.board.post(f"note {world.rank}", f"from {world.rank}")
    world.barrier("everyone has posted")
    for rank in range(world.size):
        assert world.board.read(f"note {rank}") == f"from {rank}"
    world.barrier("everyone has read")
    world.board.post(f"note {world.rank}", "again")
    assert world.board.read(f"note {world.rank}") == "again"


@law
def marks_are_cheap_and_never_fail(world, device):
    for step in range(1000):
        world.mark(step, "a very long description of what happens " * 10)


def try_laws(world, device):
    outcome = {}
    for name, each in LAWS.items():
        try:
            each(world, device)
            outcome[name] = "kept"
        except Exception:
            outcome[name] = traceback.format_exc()
    return outcome


def join(transport: str, device: torch.device):
    """Join the world that the launcher made; nccl alone gets a group of one, on one GPU."""
    import torch.distributed as dist

    from anytrain.core.environment import RankPlace, read
    from anytrain.machine.parallel import torch_dist

    if transport == "gloo":
        # A law that one rank breaks leaves the other waiting: not for half an hour.
        return torch_dist.join(read().place, transport, device, timeout_s=120)
    meeting = Path.cwd() / "store"
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=0, world_size=1, device_id=device
    )
    return torch_dist.TorchWorld(RankPlace(), device, stall_s=0, beats=None)


def main(transport: str, device_name: str) -> None:
    """Try every law, and write down what came out."""
    device = torch.device(device_name)
    world = join(transport, device)
    Path(f"laws-{world.rank}.json").write_text(json.dumps(try_laws(world, device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
else:
    import pytest

    from launching import run_command

    _TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _WORLDS = {
        "one": ([], ["gloo", "cpu"]),
        "two over gloo": (_TORCHRUN, ["gloo", "cpu"]),
        "one over nccl": ([], ["nccl", "cuda:0"]),
    }

    @pytest.fixture(scope="module")
    def outcomes(tmp_path_factory):
        """What each world's ranks found, started when the first law of that world is asked for."""
        known = {}

        def find(world: str) -> list[dict[str, str]]:
            if world not in known:
                folder = tmp_path_factory.mktemp("laws")
                launcher, words = _WORLDS[world]
                run_command([sys.executable, *launcher, __file__, *words], cwd=folder)
                found = sorted(folder.glob("laws-*.json"))
                known[world] = [json.loads(each.read_text()) for each in found]
            return known[world]

        return find

    def _all_keep(outcomes: list[dict[str, str]], name: str, size: int) -> None:
        assert len(outcomes) == size
        for rank, outcome in enumerate(outcomes):
            assert outcome[name] == "kept", f"rank {rank}: {outcome[name]}"

    @pytest.mark.parametrize("name", LAWS)
    def test_a_world_of_one_keeps_its_law(name, outcomes):
        _all_keep(outcomes("one"), name, 1)

    @pytest.mark.parametrize("name", LAWS)
    def test_two_processes_keep_the_law(name, outcomes):
        _all_keep(outcomes("two over gloo"), name, 2)

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", LAWS)
    def test_a_gpus_transport_keeps_the_law(name, outcomes):
        _all_keep(outcomes("one over nccl"), name, 1)
