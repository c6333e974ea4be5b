"""Torch's own optimizers with states next to the table, compared with the same optimizers created the usual way."""

import os

import pytest
import torch
from torch import nn

from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.host_optimizer import optimizer_of
from plimsoll.errors import InputError
from processes import run_program

# torch 2.13 warns about the sparse tensors of every optimizer, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, WIDTH = 50, 4
KINDS = [
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.8, 0.9)}),
    (torch.optim.SGD, {"lr": 0.1}),
]
named = pytest.mark.parametrize(("kind", "arguments"), KINDS, ids=["adagrad", "adagrad-started", "sparse-adam", "sgd"])
stored = pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])


def table_of(path=None):
    torch.manual_seed(1)
    return HostEmbedding(ROWS, WIDTH, path=path)


def train(table, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        (table(torch.randint(0, ROWS, (30,), generator=generator)) ** 2).sum().backward()
        optimizer.step()


def same_states(one, other):
    for a, b in zip(one.state.values(), other.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name] for name in a)
    return True


@named
@stored
def test_it_trains_as_the_optimizer_made_in_the_usual_way(kind, arguments, is_mapped, tmp_path):
    usual, mine = table_of(), table_of(tmp_path / "table" if is_mapped else None)
    expected, optimizer = kind(usual.parameters(), **arguments), optimizer_of(mine, kind, **arguments)
    assert type(optimizer) is kind
    train(usual, expected, range(10))
    train(mine, optimizer, range(10))
    assert torch.equal(usual.weight, mine.weight)
    assert kind is torch.optim.SGD or same_states(expected, optimizer)
    assert os.listdir(tmp_path) == ["table"] * is_mapped


@named
@stored
def test_a_training_goes_on_from_saved_states(kind, arguments, is_mapped, tmp_path):
    first, second = (table_of(tmp_path / name if is_mapped else None) for name in "ab")
    one, two = (optimizer_of(table, kind, **arguments) for table in (first, second))
    train(first, one, range(5))
    torch.save((first.state_dict(), one.state_dict()), tmp_path / "saved")
    places = [value.data_ptr() for value in two.state[second.weight].values() if torch.is_tensor(value) and value.dim()]
    for _ in range(2):  # the second time into a training that has begun
        weights, states = torch.load(tmp_path / "saved", mmap=True)
        second.load_state_dict(weights)
        two.load_state_dict(states)
        assert same_states(one, two)
        train(second, two, range(5, 9))
    states = two.state[second.weight].values()
    assert places == [value.data_ptr() for value in states if torch.is_tensor(value) and value.dim()]
    train(first, one, range(5, 9))
    assert torch.equal(first.weight, second.weight)
    assert same_states(one, two)


def test_states_of_the_usual_optimizer_can_be_loaded():
    usual, mine = table_of(), table_of()
    expected, optimizer = torch.optim.SparseAdam(usual.parameters()), optimizer_of(mine, torch.optim.SparseAdam)
    train(usual, expected, range(3))
    optimizer.load_state_dict(expected.state_dict())
    assert same_states(expected, optimizer)


def model_with_a_table():
    torch.manual_seed(1)
    return nn.Sequential(HostEmbedding(ROWS, WIDTH), nn.Linear(WIDTH, 3))


def test_one_adagrad_updates_the_table_and_the_rest_of_a_model():
    mine, usual = model_with_a_table(), model_with_a_table()
    expected = torch.optim.Adagrad(usual.parameters(), lr=0.1)
    optimizer = optimizer_of(mine, torch.optim.Adagrad, lr=0.1)
    train(mine, optimizer, range(5))
    train(usual, expected, range(5))
    assert all(torch.equal(one, other) for one, other in zip(mine.parameters(), usual.parameters(), strict=True))


def test_groups_keep_their_settings():
    model = model_with_a_table()
    groups = [{"params": [model[0].weight], "lr": 1.0}, {"params": model[1].parameters()}]
    optimizer = optimizer_of(model, torch.optim.Adagrad, groups, lr=0.1)
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(1.0, 1), (0.1, 2)]
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    only_rest = optimizer_of(model, torch.optim.Adagrad, model[1].parameters(), lr=0.1)
    assert len(only_rest.state) == 2


def test_a_frozen_table_is_left_out():
    model = model_with_a_table()
    model[0].weight.requires_grad_(False)
    assert len(optimizer_of(model, torch.optim.Adagrad).param_groups[0]["params"]) == 2


def test_an_optimizer_of_tables_alone_is_refused_for_other_parameters():
    with pytest.raises(InputError, match="2 of its 3 parameters have dense gradients: use torch.optim.Adagrad or SGD"):
        optimizer_of(model_with_a_table(), torch.optim.SparseAdam)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (torch.optim.AdamW, {}, "AdamW cannot update a table .*: use Adagrad, SparseAdam or SGD"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum 0.9 would keep .*: use momentum=0"),
        (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}, "weight_decay 0.1 would .*: set weight_decay=0"),
    ],
)
def test_what_would_need_the_whole_table_is_refused(kind, arguments, message):
    with pytest.raises(InputError, match=message):
        optimizer_of(table_of(), kind, **arguments)


@pytest.mark.parametrize("kind", ["Adagrad", "SparseAdam"])
def test_states_of_a_mapped_table_take_no_private_memory(kind, tmp_path):
    program = """
import sys, torch
from plimsoll.device import process
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.host_optimizer import optimizer_of

def train(table):
    optimizer = optimizer_of(table, getattr(torch.optim, sys.argv[2]), lr=0.1)
    table(torch.arange(1000)).sum().backward()
    optimizer.step()

train(HostEmbedding(1000, 25))  # the first optimizer imports much
table = HostEmbedding(1 << 20, 25, path=sys.argv[1])
before = process.private_memory()
train(table)
after = process.private_memory()
assert max(b - a for a, b in zip(before, after)) < 20 << 20, (before, after)
"""
    done = run_program(program, tmp_path / "table", kind)
    assert done.returncode == 0, done.stderr
