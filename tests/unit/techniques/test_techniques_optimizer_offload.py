"""Optimizer states off the device: the same bits, less memory, and everything as before afterwards."""

import copy
import io
from collections import defaultdict

import pytest
import torch
from torch import nn

from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.run import failpoints
from plimsoll.run.rehearse import rehearse_step
from plimsoll.run.step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, installed
from plimsoll.workload import Workload
from workloads import CASES

BATCH_SIZE = 8
DISK, HOST = (Choice(technique="optimizer_offload", options={"to": to}) for to in ("disk", "host"))
BOTH = pytest.mark.parametrize("choice", [DISK, HOST], ids=str)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
}


def fresh(case=CASES[0], make=OPTIMIZERS["adamw"]):
    model, _ = case.fresh()
    return model, make(model.parameters())


def workload_of(model, optimizer):
    return Workload(model, optimizer, lambda model, batch: model(**batch).loss, "samples")


def train(case, model, optimizer, num_steps=3):
    """Plain PyTorch."""
    losses = []
    for batch in case.batches()[:num_steps]:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_equal(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def large_states(optimizer):
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]


def is_mapped(tensor):
    """Whether a tensor lies in a file, as the kernel says."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "rw-s" in line
    return False


@BOTH
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_are_those_of_plain_pytorch(name, choice):
    plain, offloaded = fresh(make=OPTIMIZERS[name]), fresh(make=OPTIMIZERS[name])
    torch.manual_seed(3)
    expected = train(CASES[0], *plain)
    torch.manual_seed(3)
    with installed(workload_of(*offloaded), [choice]):
        losses = train(CASES[0], *offloaded)
        if choice is DISK:
            assert large_states(offloaded[1])
            assert all(map(is_mapped, large_states(offloaded[1])))
    assert losses == expected
    assert_equal(plain[0], offloaded[0])
    torch.testing.assert_close(plain[1].state_dict(), offloaded[1].state_dict(), rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_training_step_gives_the_same_bits_also_after_running_out_of_memory(case, choice):
    plain, offloaded = case.fresh(), case.fresh()
    steps = [
        TrainStep(
            *pair, units=case.units, clip_norm=1.0, recut_batch_norm=True, rungs=[[*choices, micro_batch_choice(8)]] * 2
        )
        for pair, choices in ((plain, []), (offloaded, [choice]))
    ]
    for number, batch in enumerate(case.batches()[:3]):
        torch.manual_seed(number)
        expected = steps[0](batch)
        torch.manual_seed(number)
        with failpoints.armed("optimizer", 1):
            result = steps[1](batch)
        assert result.oom_events
        assert result.loss == expected.loss
    steps[1].close()
    assert_equal(plain[0], offloaded[0])
    torch.testing.assert_close(plain[1].state_dict(), offloaded[1].state_dict(), rtol=0, atol=0)
    assert not any(map(is_mapped, large_states(offloaded[1])))


@BOTH
def test_afterwards_the_optimizer_is_an_ordinary_one(choice):
    model, optimizer = fresh()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before, step = dict(vars(optimizer)), optimizer.step
    with installed(workload_of(model, optimizer), [choice]):
        train(CASES[0], model, optimizer, 1)
        schedule.step()  # does not warn that the step was exchanged
    assert vars(optimizer).keys() == before.keys()
    assert optimizer.step is step
    assert type(optimizer.state) is defaultdict
    assert all(type(state) is dict for state in optimizer.state.values())
    assert not any(map(is_mapped, large_states(optimizer)))
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


@BOTH
def test_states_that_exist_move_and_come_back(choice):
    plain, offloaded = fresh(), fresh()
    train(CASES[0], *plain)
    train(CASES[0], *offloaded, num_steps=1)
    with installed(workload_of(*offloaded), [choice]):
        assert all(map(is_mapped, large_states(offloaded[1]))) == (choice is DISK)
    assert not any(map(is_mapped, large_states(offloaded[1])))


@BOTH
def test_a_checkpoint_is_an_ordinary_one_and_goes_where_states_are(choice):
    plain, offloaded, resumed = fresh(), fresh(), fresh()
    train(CASES[0], *plain, num_steps=2)
    with installed(workload_of(*offloaded), [choice]):
        torch.manual_seed(1)
        train(CASES[0], *offloaded, num_steps=2)
        file = io.BytesIO()
        torch.save(offloaded[1].state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    torch.testing.assert_close(loaded, plain[1].state_dict(), rtol=0, atol=0)
    kept = copy.deepcopy(loaded)
    with installed(workload_of(*resumed), [choice]):
        resumed[1].load_state_dict(loaded)
        assert all(map(is_mapped, large_states(resumed[1]))) == (choice is DISK)
        assert len(large_states(resumed[1])) == len(large_states(plain[1]))
        torch.testing.assert_close(resumed[1].state_dict(), kept, rtol=0, atol=0)
    torch.testing.assert_close(loaded, kept, rtol=0, atol=0)  # what was given stays as it was


def test_a_sentence_says_why_not():
    technique = TECHNIQUES["optimizer_offload"]
    model = nn.Linear(2, 2)
    plain = workload_of(model, torch.optim.SGD(model.parameters(), lr=1))
    assert technique.menu(plain, Setting("cpu", 8)) == "SGD as it is set up keeps no states"
    adam = workload_of(model, torch.optim.Adam(model.parameters()))
    assert technique.menu(adam, Setting("cpu", 8)) == (DISK,)
    assert technique.menu(adam, Setting("cuda", 8)) == (HOST,)
    assert technique.conflicts(DISK, (), adam, Setting("cpu", 8)) is None
    assert technique.conflicts(HOST, (), adam, Setting("cpu", 8)) == (
        "on cpu states go to `disk` and not to `host`: give to=disk"
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 80)
        self.head = nn.Linear(80, 500)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


OPTIONS = {"units": lambda ids: ids.numel(), "clip_norm": None, "precision": "fp32"}


def rehearsed(choices, lowering):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return rehearse_step(
        model, optimizer, torch.randint(500, (4, 6)), loss_of, lowering, choices=choices, micro_batch=None, **OPTIONS
    )


def test_a_rehearsed_step_needs_what_the_real_one_needs():
    predicted = live_bytes(rehearsed([DISK, micro_batch_choice(4)], CpuLowering()))
    model = Net()
    batch = torch.randint(500, (4, 6))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = TrainStep(model, optimizer, loss_of, rungs=[[DISK, micro_batch_choice(4)]], **OPTIONS)
    recorder = Recorder(phase=lambda: "copy" if step.position.phase == "fetch" else step.position.phase)
    with recorder:
        recorder.know_model(model)
        recorder.know((("", batch),), "inputs")
        for number in (1, 2, 3):
            recorder.step = number
            step(batch)
            recorder.know_optimizer(optimizer)
    assert predicted.peak_bytes == live_bytes(recorder.trace("measured", "cpu")).peak_bytes


@pytest.mark.parametrize(("choice", "lowering"), [(DISK, CpuLowering()), (HOST, CudaLowering((8, 6)))], ids=str)
def test_a_trace_has_the_states_outside(choice, lowering):
    plain, offloaded = (
        rehearsed(choices, lowering) for choices in ([micro_batch_choice(4)], [choice, micro_batch_choice(4)])
    )
    state_bytes = 2 * sum(parameter.nbytes for parameter in Net().parameters())

    def at_the_end(trace, on_host):
        table = trace.storages
        rows = zip(table.num_bytes, table.category, table.died, table.on_host, strict=True)
        return sum(
            b for b, kind, died, host in rows if kind == "optimizer states" and died < 0 and host is on_host and b > 4
        )

    assert (at_the_end(plain, False), at_the_end(plain, True)) == (state_bytes, 0)
    assert (at_the_end(offloaded, False), at_the_end(offloaded, True)) == (0, state_bytes)
