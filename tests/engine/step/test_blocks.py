"""A model's repeated blocks are found by what they are, and called in another way and back."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from anytrain.engine.step.activations import is_free, repeated, set_checkpointed


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


def stack(number: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(number)))


def test_a_bert_repeats_its_layers_and_not_what_is_in_them() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = BertModel(BertConfig(intermediate_size=64, **sizes))
    assert repeated(model) == tuple(model.encoder.layer)


def test_both_stacks_of_an_encoder_and_decoder_count() -> None:
    model = nn.ModuleDict({"encoder": stack(3), "decoder": stack(3)})
    assert len(repeated(model)) == 6


def test_few_or_small_blocks_are_no_repetition() -> None:
    assert repeated(stack(2)) == ()
    assert repeated(nn.Sequential(stack(3), nn.Linear(512, 512))) == ()
    assert repeated(nn.Linear(2, 2)) == ()
    assert repeated(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())) == ()


def test_an_embedding_however_large_hides_nothing() -> None:
    table = nn.Embedding(10_000, 8)
    head = nn.Linear(8, 10_000, bias=False)
    head.weight = table.weight
    assert len(repeated(nn.Sequential(table, stack(3), head))) == 3


def test_one_block_used_again_and_again_counts_once() -> None:
    block = Block()
    assert repeated(nn.Sequential(block, block, block)) == (block,)


def test_a_changed_call_leaves_the_module_as_it_was() -> None:
    model = stack()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    for block in repeated(model):
        set_checkpointed(block, True)
    assert list(model.state_dict()) == keys
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(block._compiled_call_impl is None for block in other)
        assert {name: set(vars(m)) for name, m in other.named_modules()} == before
    for block in repeated(model):
        set_checkpointed(block, False)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_hooks_are_called_whatever_the_call_is() -> None:
    model, seen = stack(3), []
    set_checkpointed(model[0], True)
    for block in model:
        block.register_forward_hook(lambda module, given, output: seen.append(module))
    model(torch.randn(2, 8, requires_grad=True))
    assert seen == list(model)


def test_a_block_that_is_not_trained_is_called_as_ever() -> None:
    model, saved = stack(3), []
    set_checkpointed(model[1], True)
    x = torch.randn(2, 8, requires_grad=True)

    def calls(trains: bool) -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
            model.train(trains)(x)
        return len(saved)

    assert calls(True) < calls(False)


def test_a_call_that_somebody_else_replaced_is_not_free() -> None:
    model = stack(3)
    model[0].compile(backend="eager")
    set_checkpointed(model[1], True)
    assert [is_free(block) for block in model] == [False, True, True]
