"""Joining a job, whoever launched it, and leaving it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
import torch

from anytrain.core.environment import RankPlace
from anytrain.core.errors import BadInput
from anytrain.machine.parallel import torch_dist
from anytrain.machine.parallel.world import Solo
from anytrain.machine.processes.heartbeat import read_beat
from launching import child_environment, free_port, launch, run_script, script_file

CPU = torch.device("cpu")


def test_one_process_is_a_world_of_one():
    assert isinstance(torch_dist.join(RankPlace(), "gloo", CPU), Solo)


def test_a_launcher_hears_a_world_of_one(tmp_path):
    script = """
    import sys, torch
    from anytrain.core.environment import RankPlace
    from anytrain.machine.parallel import torch_dist
    world = torch_dist.join(RankPlace(), "gloo", torch.device("cpu"), beats=sys.argv[1])
    world.mark(4, "training")
    """
    run_script(script, tmp_path)
    assert read_beat(tmp_path, 0).where() == "at step 4 (training)"


def test_ranks_without_a_meeting_point_are_told_so(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(BadInput, match="Cannot tell where the ranks of this job meet"):
        torch_dist.join(RankPlace(0, 0, 2, 2, "torchrun"), "gloo", CPU)


def test_a_meeting_point_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(BadInput, match=f"127.0.0.1:{port} is in use"):
            torch_dist.join(RankPlace(0, 0, 2, 2, "torchrun"), "gloo", CPU)


SRUN = """
import os, signal, torch
from anytrain.core import environment
from anytrain.machine.parallel import torch_dist
env = environment.read()
assert env.place.launcher == "srun"
world = torch_dist.join(env.place, "gloo", torch.device("cpu"))
print(world.gather_object(world.rank), world.transport, flush=True)
world.mark(6, "training")
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
world.barrier("the end")
"""


def srun(rank, port):
    """The variables of one task of a step, as srun sets them."""
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }


def test_srun_ranks_meet_and_a_survivor_names_the_loss_itself():
    port = free_port()
    with script_file(SRUN) as path:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(path)],
                env=child_environment(srun(rank, port)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        (out, err), _ = [rank.communicate(timeout=240) for rank in ranks]
    assert out == "[0, 1] gloo\n"
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert len(err.splitlines()) == 3
    lost = f"rank 1 (pid {ranks[1].pid})"
    assert f"Rank 0 of 2 lost {lost} at step 6 (barrier 'the end')." in err
    assert "why: rank 1 has ended; when it last spoke, it was " in err


BARE = """
import os, signal, sys, time
from anytrain.machine.processes import error_hooks
error_hooks.PATIENCE_S = 2.0
ranks = []
for rank in range(4):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        break
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    print(*codes, ranks[2], flush=True)
    os._exit(0)
os.environ.update(RANK=str(rank), WORLD_SIZE="4")
import torch
from anytrain.core import environment
from anytrain.machine.parallel import torch_dist
world = torch_dist.join(environment.read().place, "gloo", torch.device("cpu"))
world.mark(6, "training")
others = world.gather_object(os.getpid())
while not all(world._watch.heard(r) for r in range(1, 4)) and rank == 0:
    time.sleep(0.01)
world.barrier("all have spoken")
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0 and sys.argv[1] == "late":  # its neighbours have ended too when it hears of it
    import psutil
    while any(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in others[1:]):
        time.sleep(0.01)
world.barrier("the end")
"""


@pytest.mark.parametrize("when", ["at once", "late"])
def test_a_rank_that_was_killed_is_named_without_a_launcher(when):
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ran = run_script(BARE, when, env=env)
    *codes, killed = map(int, ran.stdout.split())
    assert codes == [1, 1, -signal.SIGKILL, 1]
    for rank in (0, 1, 3):
        assert f"Rank {rank} of 4 lost rank 2 (pid {killed}) at step 6" in ran.stderr


TORCHRUN = """
import torch, torch.distributed as dist
from anytrain.core import environment
from anytrain.machine.parallel import torch_dist
dist.init_process_group("gloo")
own = dist.group.WORLD
cpu = torch.device("cpu")
place = environment.read().place
world = torch_dist.join(place, "nccl", cpu)
assert dist.group.WORLD is own and world.transport == "gloo"
assert torch_dist.join(place, "nccl", cpu).gather_object(1) == [1, 1]
world.close()
world.close()
again = torch_dist.join(place, "nccl", cpu)
assert again.gather_object(again.rank) == [0, 1]
again.board.post(f"late {again.rank}", "x")
print("done", flush=True)
"""


def test_a_group_that_the_script_made_is_used_and_can_be_joined_again():
    ran = launch(TORCHRUN, 2)
    assert ran.stdout.count("done") == 2
    assert "Traceback" not in ran.stderr


def test_an_unknown_compression_is_refused():
    from anytrain.machine.strategies import ddp

    with pytest.raises(BadInput, match="Unknown comm_hook 'zip'"):
        ddp.compress(torch.nn.Identity(), {"comm_hook": "zip"})
