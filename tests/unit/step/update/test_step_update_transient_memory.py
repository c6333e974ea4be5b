"""The peak memory of an update, measured for all optimizers of torch.optim; sizes in bytes by hand."""

import inspect
import random

import pytest
import torch
from torch import nn

from plimsoll.memory.live import live_bytes
from plimsoll.memory.recorder import Recorder
from plimsoll.step.update.transient_memory import (
    SLACK_BYTES,
    blocks_of_states,
    blocks_of_temporaries,
    most_at_once,
    prove_room,
    without_states,
)
from plimsoll.techniques.mechanisms.low_bit_adam import LowBitAdam

NAMES_OF_TORCH = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
OPTIONS_OF_TORCH = (
    {}, {"weight_decay": 0.1}, {"maximize": True}, {"maximize": True, "weight_decay": 0.1}, {"amsgrad": True},
    {"momentum": 0.9}, {"momentum": 0.9, "centered": True}, {"momentum": 0.9, "maximize": True}, {"foreach": True},
    {"foreach": True, "maximize": True, "weight_decay": 0.1}, {"fused": True},
    {"fused": True, "maximize": True, "weight_decay": 0.1},
)  # fmt: skip
ALL_OF_TORCH = [
    (name, options)
    for name in NAMES_OF_TORCH
    for options in OPTIONS_OF_TORCH
    if {*options} <= {*inspect.signature(getattr(torch.optim, name)).parameters}
]


def room_for(optimizer, members):
    return most_at_once(optimizer, members, without_states(optimizer, members))


def took_and_shown(optimizer, parameters):
    """Return the bytes that an update allocated beyond known tensors, and the bytes that were reserved for it."""
    members = [
        (index, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    shown_bytes = sum(room_for(optimizer, members)) - SLACK_BYTES
    recorder = Recorder(phase=lambda: "optimizer")
    recorder.know((("", one) for one in parameters), "parameters")
    recorder.know((("", one.grad) for _, one in members), "gradients")
    recorder.know_optimizer(optimizer)
    known_bytes = sum(one.nbytes for one in parameters) + sum(one.grad.nbytes for _, one in members)
    known_bytes += state_bytes_of(optimizer)
    with recorder:
        optimizer.step()
    return live_bytes(recorder.trace("measured", "cpu")).peak_bytes - known_bytes, shown_bytes


@pytest.mark.parametrize(("name", "options"), ALL_OF_TORCH, ids=str)
@pytest.mark.parametrize("widths", [(128,), (128, 128, 128, 128), (128, 8), (8, 128)], ids=str)
def test_no_update_of_torch_takes_more_than_the_memory_reserved_for_it(name, options, widths):
    """The first step, which creates states, and the second one are measured. Tensors have up to 64 KiB.

    An eighth more than the states need is reserved, for fragmentation of the heap. With much more, a training would use
    chunks that its plan did not simulate, and run out of memory in the next step. (Adafactor's states are small, as a
    rule; Muon has a state without momentum, too.)
    """
    chosen = [nn.Parameter(torch.randn(width, 128)) for width in widths]
    optimizer = getattr(torch.optim, name)(chosen, lr=0.1, **options)
    first_bytes, shown = state_bytes_of(optimizer), []
    for _ in range(2):
        for parameter in chosen:
            parameter.grad = torch.randn_like(parameter)
        took_bytes, shown_bytes = took_and_shown(optimizer, chosen)
        assert took_bytes <= shown_bytes + 2048
        shown.append(shown_bytes)
    if name != "Muon":
        states_bytes = 9 / 8 * (state_bytes_of(optimizer) - first_bytes)
        assert shown[0] - shown[1] == pytest.approx(states_bytes, abs=256)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES_OF_TORCH)
def test_nor_does_one_with_groups_shapes_and_settings_as_they_come(name):
    """Settings change after the second step. Some gradients are missing in the first, some are not contiguous."""
    drawn = random.Random(name)
    for _ in range(8):
        groups = [group_of(name, drawn) for _ in range(drawn.choice([1, 2, 3]))]
        optimizer = getattr(torch.optim, name)(groups, lr=0.1)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for step in range(8):  # RAdam takes more from the sixth on
            for parameter in parameters:
                parameter.grad = gradient_of(parameter, drawn) if step or drawn.random() < 0.8 else None
            took_bytes, shown_bytes = took_and_shown(optimizer, parameters)
            assert took_bytes <= shown_bytes + 4096, groups
            changed = {"weight_decay": 0.1, "maximize": True} if step else {}
            for group in optimizer.param_groups:
                group.update({key: value for key, value in changed.items() if key in group})


def group_of(name, drawn):
    shapes = [(128, 128), (512, 32), (32, 512), (8, 128)]
    if name != "Muon":
        shapes += [(16384,), (1, 16384), (256, 1), (4, 64, 64), (4096, 1, 1), (4096, 1, 4)]
    dtype = drawn.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    chosen = {
        "weight_decay": drawn.choice([0.0, 0.1]), "maximize": drawn.random() < 0.5, "amsgrad": drawn.random() < 0.5,
        "momentum": drawn.choice([0.0, 0.9]), "centered": drawn.random() < 0.5,
        drawn.choice(["foreach", "fused", "loop"]): True,
    }  # fmt: skip
    known = inspect.signature(getattr(torch.optim, name)).parameters
    options = {key: value for key, value in chosen.items() if key in known}
    sizes = [drawn.choice(shapes) for _ in range(drawn.choice([1, 2, 5]))]
    return {"params": [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes], **options}


def gradient_of(parameter, drawn):
    gradient = torch.randn_like(parameter)
    return gradient.t().contiguous().t() if gradient.dim() == 2 and drawn.random() < 0.3 else gradient


def state_bytes_of(optimizer):
    return sum(one.nbytes for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one))


def test_blocks_are_as_large_as_the_parameters_and_states_that_exist_are_not_counted():
    """Of 40, 20 and 8 bytes, temporaries of the two largest count, and states of the one without, plus an eighth."""
    chosen = [nn.Parameter(torch.ones(length)) for length in (10, 5, 2)]
    optimizer = torch.optim.Adam(chosen)
    for parameter in chosen[:2]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    members = [(0, parameter) for parameter in chosen]
    assert without_states(optimizer, members) == members[2:]
    assert sorted(room_for(optimizer, members)) == [8, 8, 20, 20, 20, 40, 40, 40, SLACK_BYTES + 2]


class FromElsewhere(torch.optim.Adam):
    """An optimizer from outside torch.optim, about which nothing is known."""


def test_states_of_an_optimizer_from_elsewhere_are_as_many_as_is_said():
    chosen = [nn.Parameter(torch.ones(length)) for length in (10, 2)]
    members = [(0, parameter) for parameter in chosen]
    assert blocks_of_states(FromElsewhere(chosen), members[1:], 2.25) == [8, 8, 2]
    assert blocks_of_states(FromElsewhere(chosen), members) == [40, 8] * 3
    assert blocks_of_states(torch.optim.Adam(chosen), members[1:], 2.25) == [8, 8]


@pytest.mark.parametrize(
    ("shape", "expected_bytes"),
    [
        ((4, 6), 4 * (4 + 6)),
        ((2, 4, 6), 4 * 2 * (4 + 6)),  # of each of two matrices
        ((5,), 4 * 5),
        ((), 4),
        ((0, 6), 0),
    ],
)
def test_of_a_matrix_adafactor_keeps_rows_and_columns(shape, expected_bytes):
    parameter = nn.Parameter(torch.ones(shape))
    assert blocks_of_states(torch.optim.Adafactor([parameter]), [(0, parameter)]) == [expected_bytes]


def test_an_optimizer_of_this_package_says_what_it_takes():
    """Parameters are updated in turn, so only the temporaries of one of them exist."""
    chosen = [nn.Parameter(torch.ones(length)) for length in (5000, 300, 7000)]
    members = [(0, parameter) for parameter in chosen]
    optimizer = LowBitAdam(chosen, bits=8)
    states = [optimizer.state_bytes_of(parameter) for parameter in chosen]
    assert blocks_of_states(optimizer, members) == states
    assert blocks_of_temporaries(optimizer, members) == [optimizer.temporary_bytes_of(chosen[2])]
    assert len(set(states)) == 3


def test_free_memory_is_proven_by_taking_all_blocks_at_once_and_giving_them_back():
    prove_room([1 << 20, 0, 1 << 20], torch.device("cpu"))
    prove_room([], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="memory"):
        prove_room([1 << 20, 1 << 60], torch.device("cpu"))


def test_a_buffer_of_none_is_no_state():
    """SGD of torch before 2.0 saved such a buffer without momentum; a loaded training may still have it."""
    parameter = nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = None
    assert without_states(optimizer, [(0, parameter)]) == [(0, parameter)]
    parameter.grad = torch.ones(10)
    optimizer.step()
    assert without_states(optimizer, [(0, parameter)]) == []


def test_on_a_gpu_all_temporaries_of_a_piece_are_there_at_once():
    """torch defaults to ``foreach`` on a GPU; the loop on the CPU holds the temporaries of two parameters."""
    lengths = (10, 5, 2)
    on_gpu = [nn.Parameter(torch.ones(length, device="meta")) for length in lengths]
    here = [nn.Parameter(torch.ones(length)) for length in lengths]
    found = [
        sorted(blocks_of_temporaries(torch.optim.Adam(chosen, **options), [(0, one) for one in chosen]))
        for chosen, options in ((on_gpu, {}), (on_gpu, {"fused": False}), (here, {}))
    ]
    assert found == [[8] * 3 + [20] * 3 + [40] * 3] * 2 + [[20] * 3 + [40] * 3]


def test_each_group_has_the_kernel_and_the_settings_that_it_has():
    """A looped parameter has temporaries, but no state for momentum 0; `fused` has no temporaries in any case."""
    looped, fused = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(5))
    groups = [{"params": [looped]}, {"params": [fused], "fused": True, "momentum": 0.9, "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    members = [(0, looped), (1, fused)]
    assert sorted(room_for(optimizer, members)) == [20, 40, 40, 40, SLACK_BYTES + 2]
    assert room_for(optimizer, members[1:]) == [20, SLACK_BYTES + 2]


def test_a_gradient_of_a_wider_type_counts():
    parameter = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(10)
    optimizer = torch.optim.RMSprop([parameter])
    assert room_for(optimizer, [(0, parameter)]) == [40, 40, 40, 40, SLACK_BYTES + 5]


def test_with_foreach_all_have_their_temporaries_at_once_and_sgd_has_no_states():
    chosen = [nn.Parameter(torch.ones(length)) for length in (10, 5, 2)]
    optimizer = torch.optim.SGD(chosen, lr=0.1, foreach=True)
    sizes = room_for(optimizer, [(0, parameter) for parameter in chosen])
    assert sum(sizes) == 3 * (40 + 20 + 8) + SLACK_BYTES
