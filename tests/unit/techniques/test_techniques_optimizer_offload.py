"""Optimizer states off the device: the same bits, less memory, and everything restored afterwards."""

import copy
import io
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.build import build_model
from plimsoll.models.optimizers import build_optimizer
from plimsoll.models.workload import Workload
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step import failpoints
from plimsoll.step.job_step import step_of
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, installed
from plimsoll.techniques import optimizer_offload as offload
from plimsoll.training import checkpoint
from processes import run_program
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
    """Train in plain PyTorch."""
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
    """Return whether a tensor is in a mapped file, according to the kernel."""
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
            *pair, units=case.units, clip_norm=1.0, recut_batch_norm=True, fallbacks=[[*choices, micro_batch_choice(8)]]
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
    assert vars(optimizer).keys() == before.keys() | {"_opt_called"}  # the schedule's own
    assert optimizer.step is step
    assert type(optimizer.state) is defaultdict
    assert all(type(state) is dict for state in optimizer.state.values())
    assert not any(map(is_mapped, large_states(optimizer)))
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


@BOTH
def test_an_exit_that_runs_out_of_memory_leaves_states_that_train_on(choice, monkeypatch):
    """The first three states return at once; on CUDA the others return in the next updates, one of which fails."""
    model, optimizer = fresh()
    room_for, num_calls = offload._room_for, []

    def scarce(tensor, parameter):
        num_calls.append(tensor)
        return failpoints.exhaust_memory() if len(num_calls) == 4 else room_for(tensor, parameter)

    def leave():
        with installed(workload_of(model, optimizer), [choice]):
            train(CASES[0], model, optimizer, num_steps=1)
            monkeypatch.setattr(offload, "_room_for", scarce)

    with pytest.raises(RuntimeError, match="allocate"):
        leave()
    assert len(num_calls) == 4
    if choice == HOST:
        num_calls.pop()
        with pytest.raises(RuntimeError, match="allocate"):
            optimizer.step()
    moved = large_states(optimizer)
    train(CASES[0], model, optimizer, num_steps=2)
    if choice == HOST:
        assert not any(one is other for one, other in zip(moved[3:], large_states(optimizer)[3:], strict=True))
    else:
        assert [is_mapped(one) for one in large_states(optimizer)] == [False] * 3 + [True] * (len(moved) - 3)
    expected_model, expected_optimizer = fresh()
    for num_steps in (1, 2):
        train(CASES[0], expected_model, expected_optimizer, num_steps)
    assert_equal(expected_model, model)
    assert_equal(expected_optimizer, optimizer)


def test_a_schedule_can_be_made_meanwhile():
    model, optimizer = fresh()
    with installed(workload_of(model, optimizer), [DISK]):
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        train(CASES[0], model, optimizer, 1)
        schedule.step()
        assert all(map(is_mapped, large_states(optimizer)))
    train(CASES[0], model, optimizer, 1)
    assert not any(map(is_mapped, large_states(optimizer)))


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
    torch.testing.assert_close(loaded, kept, rtol=0, atol=0)  # the loaded state is unchanged


def test_a_run_goes_on_from_its_checkpoint_with_states_in_a_file_again(tmp_path):
    plain, offloaded, resumed = fresh(), fresh(), fresh()
    train(CASES[0], *plain)
    with installed(workload_of(*offloaded), [DISK]):
        torch.manual_seed(1)
        train(CASES[0], *offloaded)
        checkpoint.save(
            tmp_path, 3, model=offloaded[0], optimizer=offloaded[1], random_state={},
            progress={"fingerprint": {}}, keep=1,
        )  # fmt: skip
    with installed(workload_of(*resumed), [DISK]):
        checkpoint.load(tmp_path, {}).restore(*resumed)
        assert "optimizer.pt" not in Path("/proc/self/maps").read_text()  # the update changes a copy
        for state in resumed[1].state.values():
            state["exp_avg"].add_(0)
        assert all(map(is_mapped, large_states(resumed[1])))
        torch.testing.assert_close(resumed[1].state_dict(), plain[1].state_dict(), rtol=0, atol=0)
    checkpoint.load(tmp_path, {})


def test_a_sentence_says_why_not():
    technique = TECHNIQUES["optimizer_offload"]
    model = nn.Linear(2, 2)
    plain = workload_of(model, torch.optim.SGD(model.parameters(), lr=1))
    assert technique.choices(plain, Setting("cpu", 8)) == "SGD keeps no states with its current settings"
    adam = workload_of(model, torch.optim.Adam(model.parameters()))
    assert technique.choices(adam, Setting("cpu", 8)) == (DISK,)
    assert technique.choices(adam, Setting("cuda", 8)) == (HOST,)
    assert technique.conflicts(DISK, (), adam, Setting("cpu", 8)) is None
    assert technique.conflicts(HOST, (), adam, Setting("cpu", 8)) == (
        "on cpu states go to `disk` and not to `host`: give to=disk"
    )


TEXTS = TextSketch(vocab_size=2000, num_labels=None, end_id=0)
LSTM = {"architecture": "lstm", "embedding_size": 64, "hidden_size": 64}
JOB = Job.from_fields({"model": LSTM, "data": {"train": "nowhere.txt"}, "sequence_length": 8, "batch_size": 4})
WHOLE = micro_batch_choice(4)


def recorded(choices):
    """Return the trace of three real steps of the job."""
    model = build_model(JOB, *TEXTS.of_model)
    optimizer = build_optimizer(JOB.optimizer, model.parameters())
    position = Position()
    step = step_of(JOB, model, optimizer, [choices], position=position)
    batch = torch.randint(2000, (4, 8))
    recorder = Recorder(phase=lambda: "copy" if position.phase == "fetch" else position.phase)
    with recorder:
        recorder.know_model(model)
        for number in (1, 2, 3):
            recorder.step = number
            piece = batch.clone()
            step({"input_ids": piece, "labels": piece.clone()})
            recorder.know_optimizer(optimizer)
        del piece
    return recorder.trace("measured", "cpu")


def states_at_the_end(trace, on_host):
    table = trace.storages
    rows = zip(table.num_bytes, table.category, table.died, table.on_host, strict=True)
    return sum(
        num_bytes
        for num_bytes, category, died, host in rows
        if category == "optimizer states" and died < 0 and host is on_host and num_bytes > 4
    )


def test_a_dry_run_of_a_step_needs_what_the_real_one_needs():
    predicted, measured = dry_run_job(JOB, TEXTS, CpuLowering(), (DISK, WHOLE)), recorded((DISK, WHOLE))
    assert live_bytes(predicted).peak_bytes == live_bytes(measured).peak_bytes
    assert states_at_the_end(predicted, on_host=True) == states_at_the_end(measured, on_host=True) > 0


@pytest.mark.parametrize(
    ("choice", "lowering"), [(DISK, CpuLowering()), (HOST, CudaLowering((8, 6)))], ids=["cpu", "cuda"]
)
def test_a_trace_has_the_states_outside(choice, lowering):
    plain, offloaded = (dry_run_job(JOB, TEXTS, lowering, choices) for choices in ((WHOLE,), (choice, WHOLE)))
    state_bytes = 2 * sum(parameter.nbytes for parameter in build_model(JOB, *TEXTS.of_model).parameters())
    assert (states_at_the_end(plain, False), states_at_the_end(plain, True)) == (state_bytes, 0)
    assert (states_at_the_end(offloaded, False), states_at_the_end(offloaded, True)) == (0, state_bytes)
    # A training this small peaks in the update, which is a single chunk only if states are on the device.


MEASURED = """
import sys
import torch
from torch import nn
from plimsoll.device.cpu import heap
from plimsoll.device.base import limited
from plimsoll.device.process import private_bytes
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.train_step import TrainStep

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(32)])  # 32 MiB, the states 64 MiB
optimizer = torch.optim.AdamW(model.parameters())
choices = [Choice(technique="optimizer_offload", options={"to": "disk"})] if sys.argv[1] == "offload" else []
loss = lambda model, batch: model(batch["x"]).square().mean()
with limited(4 << 30):  # as every run: the heap then gives back what is freed
    step = TrainStep(model, optimizer, loss, units="samples", fallbacks=[[*choices, micro_batch_choice(4)]])
    for _ in range(2):
        step({"x": torch.ones(4, 512)})
    heap.trim()  # the heap gives the pages that the states left back by itself at times only
    print(private_bytes())
"""


def test_private_memory_is_really_lower():
    plain, offloaded = (run_program(MEASURED, what) for what in ("plain", "offload"))
    assert plain.returncode == offloaded.returncode == 0, offloaded.stderr
    assert int(plain.stdout) - int(offloaded.stdout) > 56 << 20
