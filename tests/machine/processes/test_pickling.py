from __future__ import annotations

import os

import cloudpickle
import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain.machine.processes import host_limits, pickling
from anytrain.machine.processes.spawn import SpawnOptions, call


def handed_over(thing):
    parcel = pickling.pack(thing)
    with pickling.nameless_file(
        host_limits.folder_for_tensors(parcel.num_bytes, host_limits.free_memory())
    ) as file:
        parcel.write(file)
        return pickling.receive(file.fileno())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("nothing", torch.empty(0))


def test_tensors_lie_beside_the_pickle_each_storage_once():
    model = Tied()
    parcel = pickling.pack({"model": model, "again": model.head.weight.data[3:5]})
    assert parcel.num_bytes - len(parcel.pickled) == 100 * 64 * 4
    assert len(parcel.pickled) < 5000
    by_value = cloudpickle.dumps(torch.zeros(100, 64))
    assert len(by_value) > 100 * 64 * 4


def test_ties_views_and_strides_stay_what_they_are():
    base = torch.arange(12.0)
    model, received, view, turned = handed_over((Tied(), base, base[4:8], base.view(3, 4).t()))
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, nn.Parameter)
    received[4] = 99
    assert view[0] == 99
    assert turned[0, 1] == 99
    assert turned.stride() == (1, 4)
    assert base[4] == 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(5),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True),
        torch.complex(torch.ones(2), torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.arange(6).to(torch.uint16).view(2, 3).t(),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        nn.Parameter(torch.ones(2).to(torch.float8_e5m2), requires_grad=False),
    ],
    ids=str,
)
def test_every_kind_of_tensor_arrives_as_it_was(tensor):
    found = handed_over([tensor])[0]
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert found.requires_grad == tensor.requires_grad
    assert repr(found) == repr(tensor)


def test_tensors_of_bare_dtypes_share_their_storage_and_keep_their_attributes():
    base = torch.zeros(8, dtype=torch.uint16)
    base.origin = "sensor"
    first, part, raw = handed_over((base, base[2:6], base.untyped_storage()))
    part.view(torch.int16).fill_(3)
    assert first.tolist() == [0, 0, 3, 3, 3, 3, 0, 0]
    assert first.origin == "sensor"
    assert raw.data_ptr() == first.data_ptr()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_precision_complex_numbers_stay_conjugate():
    tensor = torch.tensor([1 + 2j]).to(torch.complex32).conj()
    assert handed_over(tensor).is_conj()
    assert handed_over(tensor).tolist() == [1 - 2j]


def test_a_meta_tensor_has_nothing_to_hand_over():
    parcel = pickling.pack(torch.empty(10**6, device="meta"))
    assert parcel.num_bytes == len(parcel.pickled)
    assert handed_over(torch.empty(7, device="meta")).device.type == "meta"


def test_each_receiver_writes_to_pages_of_its_own():
    parcel = pickling.pack(torch.zeros(10_000))
    with pickling.nameless_file("/tmp") as file:
        parcel.write(file)
        one, other = (pickling.receive(file.fileno()) for _ in range(2))
    one += 1
    assert other.sum() == 0
    assert one.sum() == 10_000
    assert one.data_ptr() % 64 == 0


def test_arrays_travel_beside_the_pickle_too_and_keep_their_lock():
    array, locked = numpy.arange(1000), numpy.ones(500)
    locked.flags.writeable = False
    parcel = pickling.pack((array, locked))
    assert parcel.num_bytes - len(parcel.pickled) == array.nbytes + locked.nbytes
    found, still = handed_over((array, locked))
    found[0] = 7
    assert array[0] == 0
    assert not still.flags.writeable


def test_a_received_model_trains_and_feeds_loader_workers():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    received, rows = handed_over((model, torch.ones(8, 4)))
    optimizer = torch.optim.AdamW(received.parameters(), lr=0.1)
    for batch in DataLoader(rows, batch_size=4, num_workers=1):
        received(batch).sum().backward()
        optimizer.step()
    assert not torch.equal(received.weight, model.weight)
    received.load_state_dict(model.state_dict())
    assert torch.equal(received.weight, model.weight)


def test_globals_and_closures_are_handed_over_once_for_all_children():
    model = Tied()
    table = {"weights": [model.embed.weight], "rows": torch.arange(5)}

    def work():
        same = table["weights"][0] is model.head.weight
        return same, int(table["rows"].sum()), os.getpid()

    (same, total, pid), (same_too, total_too, pid_too) = call(
        work, (), SpawnOptions(2, 2, port=1, brings_all=True)
    )
    assert same and same_too
    assert (total, total_too) == (10, 10)
    assert pid != pid_too


def test_a_returned_tensor_comes_back():
    found = call(lambda: {"x": torch.full((3,), 2.0)}, (), SpawnOptions(1, 1, port=1))
    assert found["x"].tolist() == [2.0, 2.0, 2.0]
    found["x"] += 1
    assert found["x"].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.full
def test_eight_processes_share_one_copy_of_a_model(tmp_path):
    model = nn.Linear(10_000, 10_000, bias=False)  # 400 MB
    size = model.weight.nbytes

    def meet(folder, name, rank):
        from pathlib import Path
        from time import sleep

        Path(folder, f"{name}-{rank}").touch()
        while len(list(Path(folder).glob(f"{name}-*"))) < 8:
            sleep(0.05)

    def entry(model, folder):
        import psutil

        rank = int(os.environ["RANK"])
        model.weight.sum().item()  # every page is looked at
        meet(folder, "here", rank)
        used = psutil.Process().memory_full_info().pss
        meet(folder, "measured", rank)
        return used

    crew = SpawnOptions(8, 8, port=1, brings_all=True, environ={"OMP_NUM_THREADS": "1"})
    sums = []
    for name, handed in (("base", nn.Linear(10, 10)), ("model", model)):
        (tmp_path / name).mkdir()
        sums.append(sum(call(entry, (handed, str(tmp_path / name)), crew)))
    base, with_model = sums
    assert with_model < 2 * size + base  # 1208 MiB and 1599 MiB were measured
