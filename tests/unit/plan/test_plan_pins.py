"""What may be pinned and forbidden, and what is said of what may not: in a made-up world, and by real techniques."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from worlds import MadeUp, World

from plimsoll.errors import InputError
from plimsoll.plan.pins import decide
from plimsoll.records.plan import Choice, parse_pin
from plimsoll.techniques import Setting
from plimsoll.workload import Workload, model_loss

WORLD = World(
    [
        MadeUp("offload", seconds=(0.1, 0.2, 0.3)),
        MadeUp("bucketing"),
        MadeUp("adafactor", numerics="lossy"),
        MadeUp("impossible", reason="the model has no blocks that repeat"),
    ]
)


@pytest.fixture
def decided(inhabited):
    """Return ``decided(*pins, forbids=..., allow=...)`` in the made-up world, for a batch of 16."""
    inhabited(WORLD)

    def decide_in_it(*pins, forbids=(), allow=()):
        problem = WORLD.problem(1000, allow=allow)
        return decide([parse_pin(pin) for pin in pins], forbids, problem.workload, problem.setting)

    return decide_in_it


def test_a_value_is_of_the_first_option(decided):
    found = decided("offload=2", "micro_batch=4", "micro_batch=4", forbids=["bucketing"])
    assert found.pinned == (
        Choice(technique="offload", options={"level": 2}),
        Choice(technique="micro_batch", options={"samples": 4}),
    )
    assert (found.required, found.forbidden) == (frozenset(), {"bucketing"})


def test_an_option_is_given_by_its_name(decided):
    assert decided("offload(level=1)").pinned == (Choice(technique="offload", options={"level": 1}),)


def test_what_the_menu_does_not_have_can_be_pinned(decided):
    """16 samples in pieces of 7 take as many as in pieces of 6, so that the menu has no 7."""
    assert decided("micro_batch=7").pinned == (Choice(technique="micro_batch", options={"samples": 7}),)


def test_a_name_alone_leaves_the_options_to_the_plan_if_there_are_several(decided):
    found = decided("offload", "bucketing")
    assert found.required == {"offload"}
    assert found.pinned == (Choice(technique="bucketing", options={"level": 0}),)


def test_a_lossy_technique_can_be_pinned_where_it_is_allowed(decided):
    assert decided("adafactor", allow=["adafactor"]).pinned == (Choice(technique="adafactor", options={"level": 0}),)


REFUSED = {
    "pin-unknown": (["offlaod"], []),
    "forbid-unknown": ([], ["offlaod"]),
    "pin-unlike-any": (["frobnicate"], []),
    "pin-twice": (["offload=1", "offload=2"], []),
    "pin-and-forbid": (["offload"], ["offload"]),
    "pin-lossy": (["adafactor"], []),
    "pin-impossible": (["impossible"], []),
    "pin-unknown-option": (["offload(levle=1)"], []),
    "pin-too-large": (["micro_batch=17"], []),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason_and_what_to_do(decided, golden, name):
    pins, forbids = REFUSED[name]
    with pytest.raises(InputError) as caught:
        decided(*pins, forbids=forbids)
    golden(f"errors/{name}.txt", f"error: {caught.value}\n")


class Stack(nn.Module):
    """Four blocks that repeat."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4))


@pytest.mark.parametrize("written", ["3", "0,2-3", "every 2", "all"])
def test_an_option_that_is_a_text_is_one_also_if_it_looks_like_a_number(written):
    workload = Workload(Stack(), torch.optim.SGD([torch.zeros(1)]), model_loss, "samples")
    found = decide([parse_pin(f"checkpointing={written}")], (), workload, Setting(device="cpu", batch_size=4))
    assert found.pinned == (Choice(technique="checkpointing", options={"blocks": written}),)
