"""The laws of a strategy: what several ranks compute is what one process with the whole batch does.

This file is also the script that each rank runs: it tries every law and prints what came out. A
new row of the table gets its tests here; a law that a strategy is not meant to keep is named below.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from pathlib import Path

import torch

from anytrain.engine.checkpoint import Snapshot, Store
from anytrain.engine.checkpoint.snapshot import writer_of
from anytrain.engine.optim.state_size import model_facts
from anytrain.machine.strategies import table

LAWS = {}
RANKS = {"solo": 1, "spmd": 1, "ddp": 2, "local_sgd": 2}
APART = {
    "local_sgd": {
        "gradients_are_the_whole_batchs",
        "gradients_of_all_micro_batches_are_averaged_with_the_last",
        "the_next_backward_may_share_though_its_forward_did_not",
        "gradients_may_be_averaged_afterwards",
        "the_norm_is_the_whole_gradients",
    }
}
"""Laws that a strategy leaves on purpose: ranks of local SGD share models, not gradients."""


def law(function):
    LAWS[function.__name__] = function
    return function


def made(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def rows(number, world):
    """Return this rank's share of a batch, and the batch."""
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    share = len(whole) // world.size
    return whole[world.rank * share : (world.rank + 1) * share], whole


def loss_of(model, batch):
    return model(batch).square().mean()


def whole_gradients(model, batches):
    """Return what one process computes of whole batches."""
    alone = copy.deepcopy(model)
    for batch in batches:
        loss_of(alone, batch).backward()
    return [parameter.grad for parameter in alone.parameters()]


def near(found, wanted):
    return all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found, wanted, strict=True))


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@law
def ranks_begin_with_one_model_and_give_it_back(strategy, world, device):
    model = made(seed=world.rank)
    placed = strategy.place(model, {})
    assert strategy.original(placed) is model
    for parameter in model.parameters():
        everyones = world.gather(parameter.detach()[None])
        assert torch.equal(everyones, everyones[:1].expand_as(everyones))


@law
def a_model_with_nothing_to_train_is_returned_as_it_is(strategy, world, device):
    model = made().requires_grad_(False)
    assert strategy.place(model, {}) is model
    with strategy.accumulating(model), strategy.join([model]):
        model(torch.ones(1, 3))


@law
def gradients_are_the_whole_batchs(strategy, world, device):
    model = made()
    placed = strategy.place(model, {})
    own, whole = rows(1, world)
    wanted = whole_gradients(model, [whole])
    loss_of(placed, own).backward()
    strategy.end_backward(placed)
    assert near(gradients(model), wanted)


@law
def accumulating_leaves_gradients_on_their_rank(strategy, world, device):
    model = made()
    placed = strategy.place(model, {})
    own, _ = rows(1, world)
    wanted = whole_gradients(model, [own])
    with strategy.accumulating(placed):
        loss_of(placed, own).backward()
    assert near(gradients(model), wanted)


@law
def gradients_of_all_micro_batches_are_averaged_with_the_last(strategy, world, device):
    model = made()
    placed = strategy.place(model, {})
    (first, whole_first), (second, whole_second) = rows(1, world), rows(2, world)
    wanted = whole_gradients(model, [whole_first, whole_second])
    with strategy.accumulating(placed):
        loss_of(placed, first).backward()
    loss_of(placed, second).backward()
    strategy.end_backward(placed)
    assert near(gradients(model), wanted)


@law
def the_next_backward_may_share_though_its_forward_did_not(strategy, world, device):
    model = made()
    placed = strategy.place(model, {})
    own, whole = rows(1, world)
    wanted = whole_gradients(model, [whole])
    with strategy.accumulating(placed):
        loss = loss_of(placed, own)
    with strategy.share_next_backward(placed):
        loss.backward()
    assert near(gradients(model), wanted)


@law
def gradients_may_be_averaged_afterwards(strategy, world, device):
    model = made()
    placed = strategy.place(model, {})
    own, whole = rows(1, world)
    wanted = whole_gradients(model, [whole])
    with strategy.accumulating(placed):
        loss_of(placed, own).backward()
    strategy.average_gradients(list(model.parameters()))
    assert near(gradients(model), wanted)


@law
def the_norm_is_the_whole_gradients(strategy, world, device):
    model = made()
    placed = strategy.place(model, {})
    own, whole = rows(1, world)
    wanted = whole_gradients(model, [whole])
    loss_of(placed, own).backward()
    strategy.end_backward(placed)
    for norm_type in (2.0, 1.0, float("inf")):
        expected = torch.nn.utils.get_total_norm(wanted, norm_type)
        assert torch.allclose(strategy.norm(gradients(model), norm_type), expected)


@law
def updates_are_those_of_one_process(strategy, world, device):
    model = made()
    alone = copy.deepcopy(model)
    placed = strategy.place(model, {})
    mine = torch.optim.SGD(placed.parameters(), lr=0.5)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    for number in range(5):
        own, whole = rows(number, world)
        for optimizer, net, batch in ((theirs, alone, whole), (mine, placed, own)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
        strategy.end_backward(placed)
        theirs.step()
        mine.step()
        strategy.end_update(placed)
    assert near(model.parameters(), alone.parameters())


@law
def ranks_may_run_out_of_batches_at_different_times(strategy, world, device):
    placed = strategy.place(made(), {})
    with strategy.join([placed]):
        for number in range(world.rank + 1):
            loss_of(placed, rows(number, world)[0]).backward()
    world.barrier("all have run out")


OPTIMIZERS = (
    lambda held: torch.optim.AdamW(held, lr=0.1),
    lambda held: torch.optim.Adam(held, lr=0.1, amsgrad=True),
    lambda held: torch.optim.SGD(held, lr=0.1),
    lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9),
    lambda held: torch.optim.RMSprop(held, lr=0.1, centered=True, momentum=0.9),
    lambda held: torch.optim.NAdam(held, lr=0.1),
    lambda held: torch.optim.Adagrad(held, lr=0.1),
)


def large(seed=0):
    """Return a model with a frozen layer, a tied one, and buffers of which one is not saved."""
    torch.manual_seed(seed)
    first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    last.weight = first.weight
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    model = torch.nn.Sequential(first, frozen, torch.nn.BatchNorm1d(3), last)
    model.register_buffer("passing", torch.ones(5), persistent=False)
    return model


def trained(strategy, world, make, model):
    """Return the optimizer of a model that was trained for two steps."""
    placed = strategy.place(model, {})
    optimizer = make(placed.parameters())
    for number in range(2):
        optimizer.zero_grad()
        loss_of(placed, rows(number, world)[0]).backward()
        strategy.end_backward(placed)
        optimizer.step()
        strategy.end_update(placed)
    return optimizer


def written(strategy, world, *held):
    """Return what all ranks write of models and optimizers: its place in the whole, and values."""
    own = [
        (part.name, part.start, part.whole, part.tensor.detach().clone())
        for part in strategy.parts(*held)
        if part.writer == world.rank
    ]
    return [each for theirs in world.gather_object(own) for each in theirs]


def place_of(start, tensor):
    return tuple(slice(a, a + n) for a, n in zip(start, tensor.shape, strict=True))


@law
def parts_of_all_ranks_are_the_whole_and_each_element_is_written_once(strategy, world, device):
    for make in OPTIMIZERS:
        model = large()
        optimizer = trained(strategy, world, make, model)
        times, values = {}, {}
        for name, start, whole, tensor in written(strategy, world, model, optimizer):
            count = times.setdefault(name, torch.zeros(whole))
            count[place_of(start, tensor)] += 1
            values.setdefault(name, torch.zeros(whole))[place_of(start, tensor)] = tensor
        assert all(bool((count == 1).all()) for count in times.values())
        state = model.state_dict()
        del state["3.weight"]  # tied to the first one
        state |= {
            f"state.{number}.{name}": value
            for number, kept in optimizer.state_dict()["state"].items()
            for name, value in kept.items()
            if isinstance(value, torch.Tensor)
        }
        assert values.keys() == state.keys()
        if world.rank == 0:
            assert all(torch.equal(values[name], value) for name, value in state.items())


@law
def what_is_saved_through_parts_is_loaded_to_the_bit(strategy, world, device):
    store = Store(Path(sys.argv[2], "checkpoints"))
    for number, make in enumerate(OPTIMIZERS):
        model = large()
        optimizer = trained(strategy, world, make, model)
        snapshot = Snapshot(
            step=number,
            models=[model],
            parts={"optimizer": optimizer.state_dict()},
            writers={
                "model": writer_of("model", strategy.parts(model)),
                "optimizer": writer_of("optimizer", strategy.parts(optimizer)),
            },
        )
        loaded = store.load(store.save(f"step-{number}", snapshot, world=world).path.name)
        other = large(seed=1)
        again = trained(strategy, world, make, other)
        loaded.load_model(other, load=strategy.load)
        strategy.load(again, loaded.part("optimizer"))
        wanted = {name: whole for name, *_, whole in written(strategy, world, model, optimizer)}
        for part in strategy.parts(other, again):
            assert torch.equal(part.tensor, wanted[part.name][place_of(part.start, part.tensor)])


@law
def the_forecast_is_what_a_rank_holds_after_a_step(strategy, world, device):
    for make in OPTIMIZERS:
        model = large()
        facts = model_facts([model], [make(model.parameters())])
        told = strategy.forecast(facts, {})
        optimizer = trained(strategy, world, make, model)
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        kept = [value for own in optimizer.state.values() for value in own.values()]
        held = ([*parameters, *model.buffers()], gradients, filter(torch.is_tensor, kept))
        foretold = (told.weight_bytes, told.gradient_bytes, told.optimizer_bytes)
        assert foretold == tuple(sum(each.nbytes for each in kind) for kind in held)
        assert told.num_bytes == sum(foretold) + told.copy_bytes


def main(name):
    """Try every law with a strategy, and write down what came out."""
    from anytrain.core.environment import read
    from anytrain.machine.parallel import torch_dist

    device = torch.device("cpu")
    world = torch_dist.join(read().place, "gloo", device, timeout_s=120)
    outcome = {}
    for each, function in LAWS.items():
        if each in APART.get(name, ()):
            continue
        try:
            function(table.build(name, world, device), world, device)
            outcome[each] = "kept"
        except Exception:
            outcome[each] = traceback.format_exc()
    Path(sys.argv[2], f"laws-{world.rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1])
else:
    import pytest

    from launching import launch

    @pytest.fixture(scope="module")
    def outcomes(tmp_path_factory):
        """What each strategy's ranks found, started when its first law is asked for."""
        known = {}

        def find(name):
            if name not in known:
                folder = tmp_path_factory.mktemp("laws")
                script = Path(__file__).read_text(encoding="utf-8")
                launch(script, RANKS[name], name, folder)
                files = sorted(folder.glob("laws-*.json"))
                known[name] = [json.loads(each.read_text()) for each in files]
            return known[name]

        return find

    @pytest.mark.parametrize("name", table.TABLE)
    @pytest.mark.parametrize("law", LAWS)
    def test_ranks_keep_the_law(name, law, outcomes):
        found = outcomes(name)
        assert len(found) == RANKS[name]
        for rank, outcome in enumerate(found):
            wanted = None if law in APART.get(name, ()) else "kept"
            assert outcome.get(law) == wanted, f"rank {rank}: {outcome.get(law)}"
