"""The optimizer step in chunks, each of which happens or does not; sizes in bytes by hand (float32 is 4 bytes)."""

import copy
import gc
import json
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.device.off_device import mark_outside, states_outside
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import TornStepError
from plimsoll.memory.recorder import Recorder
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.oom_boundary import Position
from plimsoll.step.update.commit import StepCommit
from processes import run_program


class FromElsewhere(torch.optim.SGD):
    """An optimizer from outside torch.optim, which might use all parameters together."""


def parameters(*lengths):
    """Return parameters of the given lengths, each with a gradient of ones."""
    made = [nn.Parameter(torch.full((length,), float(length))) for length in lengths]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def commit_of(optimizer, chunk_bytes=1):
    """Return a commit, by default with a separate chunk for each parameter."""
    return StepCommit(optimizer, backend_for("cpu"), Position(step=4, phase="optimizer"), chunk_bytes)


def lengths_of_pieces(optimizer, chunk_bytes):
    return [[len(parameter) for parameter in chunk.parameters] for chunk in commit_of(optimizer, chunk_bytes)._whole()]


@pytest.mark.parametrize(
    ("chunk_bytes", "lengths"),
    [
        (1, [[8], [4], [3], [2], [1]]),
        (16, [[8], [4], [3], [2, 1]]),
        (28, [[8], [4, 3], [2, 1]]),
        (48, [[8, 4], [3, 2, 1]]),
        (72, [[8, 4, 3, 2, 1]]),
    ],
)
def test_the_largest_come_first_and_a_piece_has_at_most_so_many_bytes(chunk_bytes, lengths):
    optimizer = torch.optim.SGD(parameters(2, 8, 1, 4, 3), lr=0.1)
    assert lengths_of_pieces(optimizer, chunk_bytes) == lengths


def test_parts_of_parameters_are_cut_alike_on_every_rank():
    """1025 rows on two ranks are 513 and 512. By local sizes, one rank would have two chunks and the other one."""
    of_ranks = []
    for own in ((513, 1, 513), (512, 0, 512)):
        rows = parameters(*own)
        for parameter, most in zip(rows, (513, 1, 513), strict=True):
            parameter.cut_bytes = most * parameter.element_size()
        of_ranks.append([len(chunk) for chunk in lengths_of_pieces(torch.optim.SGD(rows, lr=0.1), 512 * 2 * 4)])
    assert of_ranks[0] == of_ranks[1] == [1, 2]


def test_what_is_on_the_host_comes_last_and_is_in_no_piece_with_the_device():
    optimizer = torch.optim.SGD(parameters(2, 8, 4), lr=0.1)
    on_device = [nn.Parameter(torch.zeros(length, device="meta")) for length in (3, 1)]
    for parameter in on_device:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.add_param_group({"params": on_device})
    assert lengths_of_pieces(optimizer, 1000) == [[3, 1], [8, 4, 2]]


def test_a_parameter_without_a_gradient_is_in_no_piece():
    first, second = parameters(3, 2)
    first.grad = None
    assert lengths_of_pieces(torch.optim.SGD([first, second], lr=0.1), 1) == [[2]]


def test_the_groups_of_parameters_keep_their_own_options():
    first, second, third = parameters(4, 2, 3)
    optimizer = torch.optim.SGD([{"params": [first, second], "lr": 1.0}, {"params": [third], "lr": 10.0}])
    commit_of(optimizer, chunk_bytes=28).step()  # one chunk with both groups, then the last parameter
    assert (first.tolist(), second.tolist(), third.tolist()) == ([3] * 4, [1] * 2, [-7] * 3)
    assert [group["params"] for group in optimizer.param_groups] == [[first, second], [third]]


def hooked(chosen):
    optimizer = torch.optim.SGD(chosen, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("make", [FromElsewhere, hooked], ids=["from elsewhere", "with a step hook"])
def test_what_may_look_at_all_parameters_is_one_piece(make):
    assert lengths_of_pieces(make(parameters(2, 8, 1)), 1) == [[8, 2, 1]]


@pytest.mark.parametrize("make", [FromElsewhere, hooked], ids=["from elsewhere", "with a step hook"])
def test_it_is_one_piece_after_a_failure_too(make):
    optimizer = make(parameters(2, 8, 1))
    sizes = []
    optimizer.register_step_post_hook(lambda *_: sizes.append(len(optimizer.param_groups[0]["params"])))
    commit = commit_of(optimizer)
    with armed("optimizer", 1):
        commit.step()
    assert (sizes, commit.outcome) == ([3], None)  # the size that the hook recorded in the failed try was undone, too
    with armed("optimizer", 1, 2):
        give_gradients(optimizer)
        commit.step()
    assert sizes == [3]
    assert commit.outcome is not None


def give_gradients(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)


def test_a_step_is_the_optimizers_own_and_gives_the_gradients_back():
    mine, plain = parameters(5, 2, 3), parameters(5, 2, 3)
    commit = commit_of(torch.optim.Adam(mine, lr=0.1))
    other = torch.optim.Adam(plain, lr=0.1)
    for _ in range(3):
        give_gradients(commit.optimizer)
        commit.step()
        give_gradients(other)
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    assert commit.outcome is None
    assert commit.was_called
    assert all(parameter.grad is None for parameter in mine)


def test_when_the_first_piece_fails_twice_nothing_has_happened():
    chosen = parameters(5, 2)
    optimizer = torch.optim.Adam(chosen, lr=0.1)
    commit = commit_of(optimizer)
    with armed("optimizer", 1, 2):
        commit.step()
    assert (commit.outcome.phase, commit.outcome.step) == ("optimizer", 5)
    assert [parameter.tolist() for parameter in chosen] == [[5] * 5, [2] * 2]
    assert len(optimizer.state) == 0  # states that the step created are removed
    assert all(parameter.grad is not None for parameter in chosen)
    assert [group["params"] for group in optimizer.param_groups] == [chosen]


def test_states_are_as_before_when_a_later_step_fails():
    chosen = parameters(5, 2)
    optimizer = torch.optim.Adam(chosen, lr=0.1)
    commit = commit_of(optimizer)
    commit.step()
    before = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    kept = [parameter.detach().clone() for parameter in chosen]
    give_gradients(optimizer)
    with armed("optimizer", 1, 2):
        commit.step()
    assert commit.outcome is not None
    assert all(torch.equal(a, b) for a, b in zip(chosen, kept, strict=True))
    assert [state.keys() for state in before] == [state.keys() for state in optimizer.state.values()]
    for state, expected in zip(optimizer.state.values(), before, strict=True):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


class StridedStates(torch.optim.SGD):
    """An optimizer with a transposed state, which is updated in one chunk."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter].setdefault("total", torch.zeros(3, 2).t())
            state.add_(parameter.grad)
            parameter.data.sub_(state)


def test_a_state_that_is_not_contiguous_is_put_back():
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = StridedStates([parameter], lr=0.1)
    commit = commit_of(optimizer)
    parameter.grad = torch.ones(2, 3)
    commit.step()
    parameter.grad = torch.full((2, 3), 10.0)
    with armed("optimizer", 1, 2):
        commit.step()
    assert commit.outcome is not None
    assert optimizer.state[parameter]["total"].tolist() == [[1] * 3, [1] * 3]
    assert parameter.tolist() == [[-1, 0, 1], [2, 3, 4]]


def test_memory_exchanged_between_two_steps_is_what_is_put_back():
    chosen = parameters(3)
    commit = commit_of(torch.optim.SGD(chosen, lr=1.0))
    commit.step()
    chosen[0].data = torch.full((3,), 7.0)
    give_gradients(commit.optimizer)
    with armed("optimizer", 1, 2):
        commit.step()
    assert commit.outcome is not None
    assert chosen[0].tolist() == [7] * 3


def test_states_that_were_replaced_are_not_kept_alive():
    commit = commit_of(torch.optim.Adam(parameters(3), lr=1.0))
    commit.step()
    give_gradients(commit.optimizer)
    commit.step()  # now the layout has the states
    replaced = [weakref.ref(value) for state in commit.optimizer.state.values() for value in state.values()]
    commit.optimizer.load_state_dict(copy.deepcopy(commit.optimizer.state_dict()))
    gc.collect()
    assert [tensor() for tensor in replaced] == [None] * 3


def test_a_piece_of_several_parameters_is_done_in_halves():
    optimizer = torch.optim.SGD(parameters(4, 3, 2, 1), lr=1.0)
    commit = commit_of(optimizer, chunk_bytes=1000)
    with armed("optimizer", 1, 2):  # the whole, then its first half
        commit.step()
    assert commit.outcome is None
    assert [event.action for event in commit.recovered] == ["part of the update undone and repeated"] * 2
    assert [parameter[0].item() for parameter in optimizer.param_groups[0]["params"]] == [3, 2, 1, 0]


def test_when_a_later_piece_fails_twice_the_step_is_torn_and_says_so():
    commit = commit_of(torch.optim.SGD(parameters(4, 3, 2), lr=1.0))
    with armed("optimizer", 2, 3), pytest.raises(TornStepError, match=r"of step 5 .*reload the last checkpoint"):
        commit.step()


class FailsInTheMiddle(torch.optim.SGD):
    """An optimizer that changes the first parameter, then runs out of memory, `num_failures` times."""

    num_failures = 1

    def step(self, closure=None):
        if self.num_failures:
            self.num_failures -= 1
            self.param_groups[0]["params"][0].data.zero_()
            exhaust_memory()
        return super().step(closure)


def test_a_parameter_changed_before_memory_ran_out_is_put_back():
    chosen = parameters(2, 1)
    commit = commit_of(FailsInTheMiddle(chosen, lr=0.5))
    commit.step()
    assert [parameter.tolist() for parameter in chosen] == [[1.5] * 2, [0.5]]


def test_another_error_passes_with_the_groups_whole_again():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("x")

    optimizer = Broken(parameters(2, 1), lr=0.5)
    with pytest.raises(KeyError):
        commit_of(optimizer).step()
    assert len(optimizer.param_groups[0]["params"]) == 2


# A real limit, in which all memory but `free_mib` is taken. Each parameter has 16 MiB.
LIMITED = """
import json, sys
import torch
from plimsoll.device.base import backend_for
from plimsoll.step.oom_boundary import Position
from plimsoll.step.update.commit import StepCommit

MIB = 1 << 20

def trained(num_parameters, num_steps, free_mib, arguments):
    parameters = [torch.nn.Parameter(torch.ones(4 * MIB)) for _ in range(num_parameters)]
    optimizer = torch.optim.AdamW(parameters, **arguments)
    commit = StepCommit(optimizer, backend, Position(phase="optimizer"), chunk_bytes=1)
    for _ in range(num_steps):
        step(commit, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    backend.release()
    with backend.limited(backend.use().used_bytes + 500 * MIB):
        ballast = all_but(free_mib)
        commit.step()
    is_done = commit.outcome is None
    return {
        "is_done": is_done,
        "requested_mib": None if is_done else round(commit.outcome.requested_bytes / MIB),
        "num_states": len(optimizer.state),
        "values": [parameter[0].item() for parameter in parameters],
    }

def all_but(free_mib):
    taken_mib = next(mib for mib in range(600, 0, -1) if fits(mib))
    return torch.empty((taken_mib - free_mib) * MIB, dtype=torch.uint8)

def fits(mib):
    try:
        torch.empty(mib * MIB, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True

def step(commit, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    commit.step()

backend = backend_for("cpu")
with backend.limited(backend.probe().capacity_bytes):  # large blocks are mapped, and gone when they are freed
    step(StepCommit(torch.optim.AdamW(p := [torch.nn.Parameter(torch.ones(1))]), backend, Position()), p)
    print(json.dumps([trained(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def inside_limits():
    """Return results of an AdamW step, by number of parameters, number of earlier steps, and free memory in MiB."""
    cases = [(4, 0, 160, {}), (4, 0, 200, {}), *((1, 1, free_mib, {}) for free_mib in (40, 56, 200))]
    cases += [(1, 1, free_mib, {"amsgrad": True}) for free_mib in (56, 88, 200)]
    done = run_program(LIMITED, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    return dict(zip([(*case[:3], *case[3]) for case in cases], json.loads(done.stdout), strict=True))


def test_the_first_step_is_done_only_where_all_its_states_will_fit(inside_limits):
    """In 160 MiB, the copy (16 MiB) and the states of the first of four parameters would fit.

    The rest would not: states of 3 x 2 x 16 MiB, and the temporaries of one parameter, of 3 x 16 MiB.
    """
    too_little, enough = inside_limits[4, 0, 160], inside_limits[4, 0, 200]
    assert too_little == {"is_done": False, "requested_mib": 16, "num_states": 0, "values": [1, 1, 1, 1]}
    assert (enough["is_done"], enough["num_states"]) == (True, 4)
    assert len({*enough["values"]}) == 1
    assert enough["values"][0] < 1


@pytest.mark.parametrize("case", [(1, 1, 56), (1, 1, 56, "amsgrad"), (1, 1, 88, "amsgrad")])
def test_where_a_copy_leaves_no_room_for_the_update_it_is_done_without_one(inside_limits, case):
    """A copy holds the parameter and its states: 48 MiB for Adam, 64 for AMSGrad. An update takes up to 2 x 16 more."""
    with_a_copy = inside_limits[(1, 1, 200, *case[3:])]
    assert inside_limits[case] == with_a_copy
    assert with_a_copy["is_done"]


def test_where_the_update_has_no_room_nothing_happens(inside_limits):
    outcome = inside_limits[1, 1, 40]
    assert (outcome["is_done"], outcome["requested_mib"]) == (False, 16)
    assert outcome["values"][0] > inside_limits[1, 1, 200]["values"][0]  # one step less


@pytest.mark.parametrize("leave", [False, True], ids=["on the device", "outside"])
def test_what_is_to_come_must_fit_unless_it_leaves_the_device(leave):
    """The reserve covers a state of the second parameter and three temporaries."""
    first, second = parameters(1000, 500)
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    recorder = Recorder(phase=lambda: "optimizer")
    with states_outside(optimizer, torch.clone) if leave else nullcontext(), recorder:
        commit_of(optimizer).step()
    trace = recorder.trace("measured", "cpu")
    proven = [number for number in trace.storages.shape if trace.texts[number] == "uint8[2000]"]
    assert len(proven) == (0 if leave else 1 + 3)


def test_an_update_at_once_copies_nothing_and_is_the_optimizers_own():
    mine, plain = parameters(5, 2, 3), parameters(5, 2, 3)
    optimizer, other = torch.optim.Adam(mine, lr=0.1), torch.optim.Adam(plain, lr=0.1)
    commit = StepCommit(optimizer, backend_for("cpu"), Position(phase="optimizer"))
    for _ in range(3):
        give_gradients(optimizer)
        commit.step()
        give_gradients(other)
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    assert all(parameter.grad is None for parameter in mine)
    assert commit._chunks == []


def differentiable(chosen):
    for parameter in chosen:
        parameter.requires_grad_(False)  # otherwise torch refuses to update it
    return torch.optim.SGD(chosen, lr=1.0, differentiable=True)


@pytest.mark.parametrize("make", [FromElsewhere, hooked, differentiable])
def test_an_update_that_may_take_anything_is_never_done_at_once(make):
    commit = StepCommit(make(parameters(4, 3)), backend_for("cpu"), Position(phase="optimizer"))
    commit.step()
    assert (commit.outcome, len(commit._chunks)) == (None, 1)


def test_an_update_at_once_is_looked_at_again_when_other_parameters_have_gradients():
    on_host, plain = parameters(4, 3)
    mark_outside(on_host)
    commit = StepCommit(torch.optim.SGD([on_host, plain], lr=1.0), backend_for("cpu"), Position(phase="optimizer"))
    on_host.grad = None
    commit.step()
    assert commit._chunks == []
    on_host.grad = torch.ones(4)
    commit.step()
    assert [len(chunk.parameters) for chunk in commit._chunks] == [1]
    assert (on_host.tolist(), plain.tolist()) == ([3] * 4, [2] * 3)


class OfTwo(Ranks):
    """One of two ranks; the other one has enough memory for its part only if `is_room`."""

    def __init__(self, is_room):
        super().__init__()
        self.world_size, self.is_room, self.num_asked = 2, is_room, 0

    def first_of(self, flag, place=0):
        self.num_asked += 1
        return 0 if flag else None if self.is_room else 1


@pytest.mark.parametrize(("is_room", "values"), [(True, [4, 3]), (False, [5, 4])])
def test_ranks_keep_the_first_piece_if_all_of_them_have_done_it(is_room, values):
    """A failure in a later chunk is recovered on the rank where it happens."""
    chosen, ranks = parameters(5, 4), OfTwo(is_room)
    optimizer = torch.optim.SGD(chosen, lr=1.0)
    commit = StepCommit(optimizer, backend_for("cpu"), Position(phase="optimizer"), 1, ranks)
    commit.step()
    assert [parameter[0].item() for parameter in chosen] == values
    assert (commit.outcome is None, ranks.num_asked) == (is_room, 1 if is_room else 2)


def test_memory_that_runs_out_before_an_update_begins_leaves_it_to_pieces():
    chosen = parameters(4, 3, 2, 1)
    commit = StepCommit(torch.optim.SGD(chosen, lr=1.0), backend_for("cpu"), Position(phase="optimizer"))
    with armed("optimizer", 1, 2):
        commit.step()
    assert [event.action for event in commit.recovered] == [
        "update not started, done in chunks", "part of the update undone and repeated"
    ]  # fmt: skip
    assert [parameter[0].item() for parameter in chosen] == [3, 2, 1, 0]


# As much as is left when an update begins is taken by something else; Adam's own 32 MiB are then the room it was shown.
ROBBED = (
    LIMITED.rpartition("with backend.limited(backend.probe()")[0]
    + """
parameter = torch.nn.Parameter(torch.ones(4 * MIB))
commit = StepCommit(torch.optim.Adam([parameter], lr=0.5), backend, Position(phase="optimizer"))
step(commit, [parameter])
parameter.grad = torch.ones_like(parameter)
shown, taken = commit._reserved, []

def shown_and_robbed(sizes, stack):
    found = shown(sizes, stack)
    taken.append(torch.empty(55 * MIB, dtype=torch.uint8))
    return found

commit._reserved = shown_and_robbed
backend.release()
with backend.limited(backend.use().used_bytes + 500 * MIB):
    ballast = all_but(60)
    commit.step()
print(json.dumps([len(taken), round(parameter[0].item(), 3)]))
"""
)


def test_an_update_has_the_memory_reserved_for_it_though_all_that_was_left_is_taken():
    done = run_program(ROBBED)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, 0.0]


# All parameters at once reserve 4 x 3 x 16 MiB for the temporaries of `foreach`, one at a time a quarter of it.
NO_ROOM_AT_ONCE = (
    LIMITED.rpartition("with backend.limited(backend.probe()")[0]
    + """
parameters = [torch.nn.Parameter(torch.ones(4 * MIB)) for _ in range(4)]
optimizer = torch.optim.SGD(parameters, lr=0.5, weight_decay=0.5, foreach=True)
commit = StepCommit(optimizer, backend, Position(phase="optimizer"))
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
backend.release()
with backend.limited(backend.use().used_bytes + 500 * MIB):
    ballast = all_but(int(sys.argv[1]))
    commit.step()
updated = {parameter[-1].item() for parameter in parameters}
print(json.dumps([len(commit._chunks) > 1, len(commit.recovered), *updated]))
"""
)


def test_an_update_that_has_no_room_at_once_is_done_in_pieces():
    done = [run_program(NO_ROOM_AT_ONCE, free_mib) for free_mib in ("60", "300")]
    assert [json.loads(one.stdout) for one in done] == [[True, 0, 0.25], [False, 0, 0.25]], done[0].stderr
