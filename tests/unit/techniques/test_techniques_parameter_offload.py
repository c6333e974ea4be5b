"""Parameters in a mapped file: the same bits, the same objects, and ordinary memory afterwards."""

import pytest
import torch
from torch import nn

from plimsoll.device.mapped_memory import MappedPool
from plimsoll.models.in_files import made_in
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step import failpoints
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, installed
from plimsoll.techniques.mechanisms.building import builds_outside
from processes import run_program
from workloads import CASES, largest_relative_difference, plain_loop, weights_of

ALONE, WITH_GRADIENTS = (Choice(technique="parameter_offload", options={"gradients": one}) for one in (False, True))
BOTH = pytest.mark.parametrize("choice", [ALONE, WITH_GRADIENTS], ids=str)


def is_mapped(tensor):
    """Return whether a tensor is in a mapped file, according to the kernel."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return "rw-s" in line
    return False


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_three_steps_are_those_of_plain_pytorch_also_after_running_out_of_memory(case, choice):
    plain, offloaded = case.fresh(), case.fresh()
    objects = [*offloaded[0].parameters()]
    steps = [
        TrainStep(
            *pair,
            units=case.units,
            recut_batch_norm=True,
            fallbacks=[[*choices, micro_batch_choice(4)], [*choices, micro_batch_choice(2)]],
        )
        for pair, choices in ((plain, []), (offloaded, [choice]))
    ]
    for number, batch in enumerate(case.batches()[:3]):
        losses = []
        for step in steps:
            torch.manual_seed(number)
            with failpoints.armed("backward", 2):
                losses.append(step(batch).loss)
        assert losses[0] == losses[1]
        assert all(map(is_mapped, objects))
    keys = offloaded[0].state_dict().keys()
    steps[1].close()
    assert all(one is other for one, other in zip(offloaded[0].parameters(), objects, strict=True))
    assert not any(map(is_mapped, objects))
    assert offloaded[0].state_dict().keys() == keys == plain[0].state_dict().keys()
    torch.testing.assert_close(plain[0].state_dict(), offloaded[0].state_dict(), rtol=0, atol=0)


@BOTH
def test_gradients_move_where_that_is_asked_for_and_add_up_in_place(choice):
    model = nn.Linear(3, 2)
    workload = Workload(model, None, lambda model, x: model(x).sum(), "samples")
    with installed(workload, [choice]):
        model(torch.ones(4, 3)).sum().backward()
        place = model.weight.grad.data_ptr()
        model(torch.ones(4, 3)).sum().backward()
        assert model.weight.grad.data_ptr() == place
        assert is_mapped(model.weight.grad) == (choice is WITH_GRADIENTS)
    assert model.weight.grad.tolist() == [[8, 8, 8]] * 2
    assert not is_mapped(model.weight.grad)
    assert not model.weight._post_accumulate_grad_hooks


def test_what_shares_memory_still_does():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    model[1].weight = model[0].weight
    model[2].weight = nn.Parameter(model[0].weight.detach().t())
    with installed(Workload(model, None, None, "samples"), [ALONE]):
        assert model[1].weight is model[0].weight
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        assert model[2].weight.tolist() == [[1, 3], [2, 4]]
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()


def test_an_exit_that_runs_out_of_memory_leaves_parameters_that_train_on(monkeypatch):
    """Two storages return to memory, one of them tied."""
    case = CASES[0]
    model, optimizer = case.fresh()
    parameters, clone, num_clones = list(model.parameters()), torch.Tensor.clone, []

    def scarce(tensor):
        num_clones.append(tensor)
        return exhaust_memory() if len(num_clones) == 3 else clone(tensor)

    def leave():
        with installed(Workload(model, optimizer, None, "samples"), [WITH_GRADIENTS]):
            plain_loop(case, model, optimizer, [8])
            monkeypatch.setattr(torch.Tensor, "clone", scarce)

    with pytest.raises(RuntimeError, match="allocate"):
        leave()
    monkeypatch.undo()
    assert [is_mapped(parameter) for parameter in parameters] == [False] * 2 + [True] * (len(parameters) - 2)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    plain_loop(case, model, optimizer, [8, 8])
    expected, expected_optimizer = case.fresh()
    for cuts in ([8], [8, 8]):
        plain_loop(case, expected, expected_optimizer, cuts)
    assert largest_relative_difference(weights_of(expected, expected_optimizer), weights_of(model, optimizer)) == 0


def test_a_sentence_says_why_not():
    technique, workload = TECHNIQUES["parameter_offload"], Workload(nn.Linear(2, 2), None, None, "samples")
    assert technique.choices(workload, Setting("cpu", 8)) == (ALONE, WITH_GRADIENTS)
    assert "layer_streaming" in technique.choices(workload, Setting("cuda", 8))
    assert "layer_streaming" in technique.conflicts(ALONE, (), workload, Setting("cuda", 8))


def test_a_model_that_was_built_in_files_is_taken_over_and_stays_there():
    """Nothing is copied in either direction; only parameters that were not built in files return to memory."""
    pool = MappedPool()
    with made_in(pool):
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 2))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    workload = Workload(model, None, None, "samples", files=pool)
    with installed(workload, [WITH_GRADIENTS]):
        assert all(map(is_mapped, model.parameters()))
        assert model[0].weight.data_ptr() == places[0]
        model(torch.ones(2, 256)).sum().backward()
    assert [is_mapped(parameter) for parameter in model.parameters()] == [True, False, False]
    assert model[0].weight.data_ptr() == places[0]
    assert builds_outside([micro_batch_choice(1), ALONE], "cpu")
    assert not builds_outside([micro_batch_choice(1)], "cpu")


MEASURED = """
import torch
from torch import nn
from plimsoll.device.base import limited
from plimsoll.device.process import private_bytes
from plimsoll.records.plan import Choice
from plimsoll.techniques import installed
from plimsoll.models.workload import Workload

model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])  # 64 MiB
workload = Workload(model, None, None, "samples")
x = torch.ones(4, 1024)
model(x)
with limited(4 << 30):
    before = private_bytes()
    with installed(workload, [Choice(technique="parameter_offload", options={"gradients": True})]):
        model(x).sum().backward()
        print((private_bytes() - before) >> 20)
"""


def test_private_memory_is_really_lower():
    done = run_program(MEASURED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < -50
