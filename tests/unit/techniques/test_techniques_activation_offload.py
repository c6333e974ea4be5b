"""Offloaded activations: the same bits, less memory, and no trace afterwards."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.trace import dry_run
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step import failpoints
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, activation_offload, installed
from processes import run_program
from workloads import CASES

DISK, HOST = (Choice(technique="activation_offload", options={"to": to}) for to in ("disk", "host"))
BOTH = pytest.mark.parametrize("choice", [DISK, HOST], ids=str)


@pytest.fixture
def all_sizes(monkeypatch):
    """Offload tensors of all sizes, because small models have small activations."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)


class Kept:
    """A record of all offloaded tensors as they are created."""

    def __init__(self, monkeypatch):
        self.made, original = [], activation_offload._Kept.__init__

        def make(kept, whole, away, previous):
            original(kept, whole, away, previous)
            self.made.append((weakref.ref(kept), kept.num_bytes))

        monkeypatch.setattr(activation_offload._Kept, "__init__", make)

    @property
    def alive_bytes(self):
        return sum(num_bytes for kept, num_bytes in self.made if kept() is not None)


def workload_of(model, optimizer=None, loss=lambda model, batch: model(**batch).loss):
    return Workload(model, optimizer, loss, "samples")


@BOTH
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("all_sizes")
def test_three_steps_are_those_of_plain_pytorch(case, choice, monkeypatch):
    kept = Kept(monkeypatch)
    plain, offloaded = case.fresh(), case.fresh()
    workloads = [workload_of(*plain), workload_of(*offloaded)]
    loss = workloads[1].loss
    with installed(workloads[1], [choice]):
        for number, batch in enumerate(case.batches()[:3]):
            losses = []
            for workload in workloads:
                torch.manual_seed(number)
                workload.optimizer.zero_grad()
                losses.append(workload.loss(workload.model, batch))
                losses[-1].backward()
            assert torch.equal(*losses)
            for one, other in zip(plain[0].parameters(), offloaded[0].parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
            for workload in workloads:
                workload.optimizer.step()
    assert len(kept.made) > 3
    assert kept.alive_bytes == 0
    assert workloads[1].loss is loss


class Net(nn.Module):
    """A model that saves the input of each layer and tanh: 64 x 256 floats, which are 64 KiB."""

    def __init__(self, checkpointed=False, num_layers=6):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(num_layers)])
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointed else self.block(layer, x)
        return x

    @staticmethod
    def block(layer, x):
        return torch.tanh(layer(x)) * 2


@BOTH
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.usefixtures("all_sizes")
def test_gates_that_are_changed_in_place_one_by_one_are_kept_as_they_are(layer, choice):
    """CPU cells of torch split the gates into chunks with separate version counters."""
    torch.manual_seed(0)
    model, x = layer(6, 8), torch.randn(9, 3, 6)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 5, 2]))
    gradients = []
    for choices in ([], [choice]):
        workload = workload_of(model, loss=lambda model, batch: model(batch)[0].data.square().sum())
        with installed(workload, choices):
            gradients.append(torch.autograd.grad(workload.loss(model, packed), list(model.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def net_loss(model, x):
    return model(x).sum()


@pytest.mark.usefixtures("all_sizes")
def test_a_storage_that_is_saved_twice_is_kept_once_and_parameters_stay(monkeypatch):
    kept = Kept(monkeypatch)
    weight = nn.Linear(8, 8, bias=False)

    def loss(model, x):
        hidden = x * 1  # saves nothing
        first, second = hidden.split(4, dim=1)
        return (
            model(hidden) + hidden.exp().sum() * (first * second).sum() + model.weight.t().sum() * hidden.sum()
        ).sum()

    workload = workload_of(weight, loss=loss)
    with installed(workload, [DISK]):
        value = workload.loss(weight, torch.randn(16, 8, requires_grad=True))
    assert kept.alive_bytes >= 16 * 8 * 4
    sizes = [num_bytes for reference, num_bytes in kept.made if num_bytes == 16 * 8 * 4]
    assert len(sizes) == 2  # `hidden`, which the linear layer and two views of it save, and its exponential
    assert 8 * 8 * 4 not in [num_bytes for _, num_bytes in kept.made]
    value.backward()
    assert kept.alive_bytes == 0


def test_small_ones_stay(monkeypatch):
    kept = Kept(monkeypatch)
    model = Net()
    workload = workload_of(model, loss=net_loss)
    with installed(workload, [DISK]):
        workload.loss(model, torch.randn(64, 256))
        assert not kept.made
        workload.loss(model, torch.randn(1024, 256))  # of 1 MiB each
        assert kept.made


@BOTH
@pytest.mark.usefixtures("all_sizes")
def test_the_inputs_of_checkpointed_blocks_are_kept(choice, monkeypatch):
    kept = Kept(monkeypatch)
    torch.manual_seed(0)
    model = Net(checkpointed=True)
    x = torch.randn(64, 256)
    net_loss(model, x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    workload = workload_of(model, loss=net_loss)
    with installed(workload, [choice]):
        value = workload.loss(model, x)
        assert kept.alive_bytes == 6 * (64 << 10)
        value.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert kept.alive_bytes == 0


@BOTH
@pytest.mark.usefixtures("all_sizes")
def test_a_graph_that_is_dropped_leaves_nothing(choice, monkeypatch):
    kept = Kept(monkeypatch)
    model = Net()
    workload = workload_of(model, loss=net_loss)
    with installed(workload, [choice]):
        value = workload.loss(model, torch.randn(64, 256))
        assert kept.alive_bytes > 0
        gc.disable()  # no cycle holds it
        try:
            del value
            assert kept.alive_bytes == 0
        finally:
            gc.enable()
        with torch.no_grad():
            workload.loss(model, torch.randn(64, 256))
        assert kept.alive_bytes == 0


@BOTH
@pytest.mark.parametrize("point", ["forward", "loss", "backward"])
@pytest.mark.usefixtures("all_sizes")
def test_running_out_of_memory_leaves_nothing(choice, point, monkeypatch):
    kept = Kept(monkeypatch)
    case = CASES[0]
    plain, offloaded = case.fresh(), case.fresh()
    steps = [
        TrainStep(*pair, units=case.units, fallbacks=[[*choices, micro_batch_choice(size)] for size in (8, 4)])
        for pair, choices in ((plain, []), (offloaded, [choice]))
    ]
    for number, batch in enumerate(case.batches()[:3]):
        results = []
        for step in steps:
            torch.manual_seed(number)
            with failpoints.armed(point, 1):
                results.append(step(batch))
        assert results[0].loss == results[1].loss
    assert kept.made
    assert kept.alive_bytes == 0
    steps[1].close()
    torch.testing.assert_close(plain[0].state_dict(), offloaded[0].state_dict(), rtol=0, atol=0)


def changed_where_it_is(x):
    hidden = x.exp()  # which backward needs
    result = hidden * 2
    hidden += 1
    return result.sum()


def changed_before_it_is_sent(x):
    hidden = x.exp()
    result = hidden * 2
    hidden += 1
    return result.tanh().sum()


def changed_while_it_is_sent(x):
    hidden = x.exp()
    result = hidden.tanh()
    hidden += 1
    return result.sum()


def changed_after_it_was_sent(x):
    hidden = x.exp()
    result = hidden.tanh().square().exp()
    hidden += 1
    return result.sum()


def changed_through_a_view(x):
    hidden = x.exp()
    result = hidden.tanh().square().exp()
    hidden[1:].zero_()
    return result.sum()


def changed_after_the_pass(x):
    hidden = x.exp()
    AFTER_THE_PASS.append(hidden.detach())
    return hidden.tanh().square().sum()


AFTER_THE_PASS = []  # is changed before backward


@pytest.mark.parametrize(
    "program",
    [changed_where_it_is, changed_before_it_is_sent, changed_while_it_is_sent, changed_after_it_was_sent,
     changed_through_a_view, changed_after_the_pass],
)  # fmt: skip
@pytest.mark.usefixtures("all_sizes")
def test_what_is_changed_in_place_after_it_was_saved_is_refused_as_by_plain_pytorch(program):
    def backward(loss):
        value = loss(x)
        while AFTER_THE_PASS:
            AFTER_THE_PASS.pop().add_(1)
        value.backward()

    x = torch.zeros(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace"):
        backward(program)
    workload = workload_of(nn.Identity(), loss=lambda model, x: program(x))
    with installed(workload, [HOST]), pytest.raises(InputError, match="64 B that backward needs was changed in place"):
        backward(lambda x: workload.loss(workload.model, x))


@pytest.mark.usefixtures("all_sizes")
def test_what_is_changed_in_place_before_it_is_saved_is_let_through_and_its_versions_keep_no_memory():
    seen = []

    def loss(model, x):
        hidden = x * 1  # which is not needed
        hidden += 1
        hidden = hidden.exp()
        seen.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden.tanh().square().sum()

    x = torch.zeros(4, 4, requires_grad=True)
    workload = workload_of(nn.Identity(), loss=loss)
    with installed(workload, [HOST]):
        value = workload.loss(workload.model, x)
        assert seen[0].expired()
        value.backward()
    expected = torch.zeros(4, 4, requires_grad=True)
    loss(None, expected).backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.usefixtures("all_sizes")
def test_a_pool_is_not_exceeded(monkeypatch):
    kept = Kept(monkeypatch)
    model = Net()
    workload = workload_of(model, loss=net_loss)
    bounded = Choice(technique="activation_offload", options={"to": "host", "pool_bytes": 200 << 10})
    with installed(workload, [bounded]):
        workload.loss(model, torch.randn(64, 256)).backward()
        assert len(kept.made) == 3  # of 64 KiB
        workload.loss(model, torch.randn(64, 256)).backward()
        assert len(kept.made) == 6


def test_a_sentence_says_why_not():
    technique, workload = TECHNIQUES["activation_offload"], workload_of(Net())
    assert technique.choices(workload, Setting("cpu", 8)) == (DISK,)
    assert technique.choices(workload, Setting("cuda", 8)) == (HOST,)
    assert technique.conflicts(DISK, (), workload, Setting("cpu", 8)) is None
    assert technique.conflicts(DISK, (), workload, Setting("cuda", 8)) == (
        "on cuda activations go to `host`, not `disk`: give to=host"
    )
    empty = Choice(technique="activation_offload", options={"to": "host", "pool_bytes": 0})
    assert "give pool_bytes of 1 or more" in technique.conflicts(empty, (), workload, Setting("cuda", 8))


def one_pass(choice, place, model, x):
    """Record a forward and backward pass."""
    workload = workload_of(model, loss=net_loss)
    place.know_model(model)
    place.step = 1
    with installed(workload, [choice] if choice else []):
        workload.loss(model, x).backward()


def predicted(choice, lowering, num_rows=64):
    with dry_run(lowering, lambda: "forward") as stage:
        model = Net().to(lowering.device)
        one_pass(choice, stage.recorder, model, torch.randn(num_rows, 256, device=lowering.device))
    return live_bytes(stage.trace())


def measured(choice):
    recorder = Recorder(phase=lambda: "forward")
    with recorder:
        one_pass(choice, recorder, Net(), torch.randn(64, 256))
    return live_bytes(recorder.trace("measured", "cpu"))


@pytest.mark.parametrize("choice", [None, DISK, HOST], ids=str)
@pytest.mark.usefixtures("all_sizes")
def test_a_dry_run_of_a_pass_needs_what_the_real_one_needs(choice):
    assert predicted(choice, CpuLowering()).peak_bytes == measured(choice).peak_bytes


@pytest.mark.parametrize(
    ("choice", "lowering"), [(DISK, CpuLowering()), (HOST, CudaLowering((8, 6)))], ids=["cpu", "cuda"]
)
@pytest.mark.usefixtures("all_sizes")
def test_a_trace_needs_less(choice, lowering):
    less_bytes = predicted(None, lowering, 2048).peak_bytes - predicted(choice, lowering, 2048).peak_bytes
    assert less_bytes >= 7 * (2 << 20)  # of the 12 of 2 MiB that are saved


MEASURED = """
import sys
import torch
from torch import nn
from plimsoll.device.base import limited
from plimsoll.device.process import private_bytes
from plimsoll.records.plan import Choice
from plimsoll.techniques import installed
from plimsoll.models.workload import Workload

model = nn.Sequential(*[module for _ in range(16) for module in (nn.Linear(256, 256), nn.Tanh())])
workload = Workload(model, None, lambda model, x: model(x).sum(), "samples")
choices = [Choice(technique="activation_offload", options={"to": "disk"})] if sys.argv[1] == "offload" else []
with limited(4 << 30), installed(workload, choices):
    x = torch.randn(8192, 256)  # 8 MiB, and 16 outputs of as much are saved
    workload.loss(model, x[:8]).backward()
    before = private_bytes()
    loss = workload.loss(model, x)
    print(private_bytes() - before)
    loss.backward()
    del loss
    print(private_bytes() - before)
"""


def test_private_memory_is_really_lower():
    plain, offloaded = (run_program(MEASURED, what) for what in ("plain", "offload"))
    assert plain.returncode == offloaded.returncode == 0, offloaded.stderr
    saved, left = map(int, offloaded.stdout.split())
    assert int(plain.stdout.split()[0]) > 120 << 20
    assert saved < 20 << 20
    assert left < 8 << 20
