"""Copies on a side stream: a reader that waits for them sees them, and no memory is reused before."""

import copy
import random
from contextlib import nullcontext
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from late_link import late_copies
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step import failpoints
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import activation_offload, installed
from plimsoll.techniques.checkpointing import checkpointing_choice
from plimsoll.techniques.mechanisms import side_stream
from plimsoll.techniques.mechanisms.side_stream import Leaving, SideStream, Transfer
from plimsoll.techniques.mechanisms.streamed_layers import streamed

CPU = torch.device("cpu")
STREAMING, OFFLOADED, ACTIVATIONS = (
    Choice(technique="layer_streaming", options={"blocks": "all"}),
    Choice(technique="optimizer_offload", options={"to": "host"}),
    Choice(technique="activation_offload", options={"to": "host"}),
)


def test_on_the_cpu_copies_are_made_at_once_and_what_is_on_the_device_is_kept_until_it_is_waited_for():
    side, there, home = SideStream(CPU), torch.zeros(3), torch.ones(3)
    for transfer, is_there in ((side.bring([(there, home)]), there), (side.send([(home, there)]), there)):
        assert there.tolist() == home.tolist() == [1, 1, 1]
        assert [one is is_there for one in transfer._on_device] == [True]
        transfer.synchronize()
        assert transfer._on_device
        transfer.wait()
        assert not transfer._on_device


def test_only_the_last_few_leave_at_the_same_time():
    transfers = [Transfer([torch.zeros(1)]) for _ in range(5)]
    leaving = Leaving(2)
    for transfer in transfers:
        leaving.add(transfer)
    assert [bool(one._on_device) for one in transfers] == [False] * 3 + [True] * 2
    leaving.wait()
    assert not any(one._on_device for one in transfers)


def test_a_late_link_sees_what_is_read_or_given_back_too_early():
    with late_copies():
        target = torch.zeros(3)
        transfer = SideStream(CPU).bring([(target, torch.ones(3))])
        assert target.isnan().all()
        transfer.wait()
        assert target.tolist() == [1, 1, 1]

    def overwritten():
        source = torch.ones(3)
        transfer = SideStream(CPU).send([(torch.zeros(3), source)])
        source.add_(1)
        transfer.wait()

    def given_back():
        transfer = SideStream(CPU).send([(torch.zeros(3), torch.ones(3))])
        transfer._on_device.clear()
        transfer.wait()

    def written_at_home():
        side, home, source = SideStream(CPU), torch.zeros(3), torch.ones(3)
        transfer = side.send([(home, source)])
        home.fill_(2)  # without waiting
        transfer.wait()
        side.bring([(torch.zeros(3), home)]).wait()

    faults = (
        (overwritten, "overwritten before"), (given_back, "given back before"), (written_at_home, "written by"),
    )  # fmt: skip
    for fault, text in faults:
        with pytest.raises(AssertionError, match=text), late_copies():
            fault()


def test_a_late_link_brings_what_the_processor_has_written_to_what_was_sent():
    with late_copies():
        side, home, there, source = SideStream(CPU), torch.zeros(3), torch.zeros(3), torch.ones(3)
        transfer = side.send([(home, source)])
        transfer.wait()
        arrival = side.bring([(there, home)])
        arrival.wait()
        assert there.tolist() == [1, 1, 1]
        transfer.synchronize()
        home.mul_(5)
        transfer.synchronize()  # once more, which changes nothing
        arrival = side.bring([(there, home)])
        arrival.wait()
        assert there.tolist() == home.tolist() == [5, 5, 5]


class Net(nn.Module):
    """A model of blocks of random width, some of them used twice, some checkpointed."""

    def __init__(self, chance: random.Random):
        super().__init__()
        width = 8
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, wide), nn.Tanh(), nn.Dropout(0.2), nn.Linear(wide, width))
            for wide in chance.choices((4, 8, 16), k=chance.randint(2, 5))
        )
        self.head = nn.Linear(width, 3)
        self.times = [chance.choice((1, 1, 2)) for _ in self.layers]
        self.is_checkpointed = [chance.random() < 0.4 for _ in self.layers]

    def forward(self, x):
        for block, times, is_checkpointed in zip(self.layers, self.times, self.is_checkpointed, strict=True):
            for _ in range(times):
                x = x + (checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x))
        return self.head(x)


def passes(model, num_passes=3):
    """Return the accumulated gradients of passes with evaluations between them."""
    for number in range(num_passes):
        torch.manual_seed(number)
        model(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            model(torch.randn(2, 8))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("seed", range(12))
def test_streamed_blocks_wait_for_their_copies_whatever_the_link_does(seed):
    plain = Net(random.Random(seed)).train()
    model = copy.deepcopy(plain)
    names = [f"layers.{number}" for number in range(len(model.layers))]
    with late_copies(seed or None) as link, streamed(model, names, device=CPU):
        found = passes(model)
    assert link.num_late
    assert all(torch.equal(one, other) for one, other in zip(found, passes(plain), strict=True))


def chosen(chance):
    """Return a random choice of techniques that copy, and of techniques that may be combined with them."""
    bounded = ACTIVATIONS.model_copy(
        update={"options": {"to": "host", "pool_bytes": chance.choice((300, 2000, 10**6))}}
    )
    beside = [checkpointing_choice("all"), STREAMING, OFFLOADED, chance.choice((ACTIVATIONS, bounded))]
    return chance.sample(beside, chance.randint(1, 4))


def trained(model, choices, optimizer=torch.optim.AdamW, fails=MappingProxyType({})):
    """Return losses of four steps, states and weights; memory runs out in the phases given by `fails`."""
    device = next(model.parameters()).device

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    fallbacks = [[*choices, micro_batch_choice(samples)] for samples in (8, 4, 2)]
    made = optimizer(model.parameters(), lr=1e-2)
    step = TrainStep(model, made, loss, units="samples", clip_norm=1.0, fallbacks=fallbacks)
    step._commit._chunk_bytes = 200
    losses = []
    for number in range(4):
        torch.manual_seed(number)
        batch = {"x": torch.randn(8, 8).to(device)}
        with failpoints.armed(fails[number], 1) if number in fails else nullcontext():
            losses.append(step(batch).loss)
    states = [value.clone() for one in model.parameters() for value in made.state[one].values()]
    step.close()
    return losses, [*states, *model.parameters()]


@pytest.mark.parametrize("seed", range(16))
def test_steps_have_the_bits_of_plain_ones_whatever_the_link_does(seed, monkeypatch):
    """This holds even if memory runs out in some phase of some steps."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)
    chance = random.Random(seed)
    choices, is_short = chosen(chance), chance.random() < 0.5
    model = Net(chance).train()
    optimizer = chance.choice((torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad))
    fails = {number: chance.choice(("forward", "backward", "clip", "optimizer")) for number in (1, 2) if is_short}

    plainly = [one for one in choices if one.technique == "checkpointing"]
    expected, tensors = trained(copy.deepcopy(model), plainly, optimizer, fails)
    with late_copies(seed or None) as link:
        losses, found = trained(model, choices, optimizer, fails)
    assert bool(link.num_asked) == any(one.technique != "checkpointing" for one in choices)
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_a_backward_within_the_loss_brings_back_what_has_been_sent(seed, monkeypatch):
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)
    model = Net(random.Random(seed)).eval()

    def loss(model, x):
        value = model(x).square().mean()
        return value + sum(one.sum() for one in torch.autograd.grad(value, [*model.parameters()], retain_graph=True))

    gradients = []
    for choices in ([], [ACTIVATIONS]):
        workload = Workload(model, None, loss, "samples")
        with late_copies(seed or None), installed(workload, choices):
            torch.manual_seed(0)
            gradients.append(torch.autograd.grad(workload.loss(model, torch.randn(4, 8)), [*model.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.gpu
def test_on_cuda_what_is_asked_for_afterwards_sees_the_copies_of_both_ways():
    device = torch.device("cuda")
    source, target = torch.arange(1 << 24, dtype=torch.float32).pin_memory(), torch.zeros(1 << 24, device=device)
    back, side = torch.zeros_like(source).pin_memory(), SideStream(device)
    side.bring([(target, source)]).wait()
    target += 1
    side.send([(back, target)]).synchronize()
    assert torch.equal(back, source + 1)


@pytest.mark.gpu
def test_on_cuda_memory_is_not_given_to_others_while_it_is_copied():
    device = torch.device("cuda")
    side, back = SideStream(device), torch.empty(1 << 26, dtype=torch.uint8).pin_memory()
    for value in range(8):
        leaving = torch.full_like(back, value, device=device)
        transfer = side.send([(back, leaving)])
        del leaving
        with_it = torch.full_like(back, 255, device=device)  # of the size that would be free
        transfer.synchronize()
        assert int(back.max()) == int(back.min()) == value
        del with_it, transfer


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [{}, {1: "backward", 2: "optimizer"}], ids=["none", "two"])
@pytest.mark.parametrize("choices", [[ACTIVATIONS], [OFFLOADED], [ACTIVATIONS, OFFLOADED]], ids=str)
def test_on_cuda_steps_have_the_bits_of_plain_ones(choices, fails, monkeypatch):
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)
    model = Net(random.Random(3)).train().cuda()
    expected, tensors = trained(copy.deepcopy(model), [], fails=fails)
    losses, found = trained(model, choices, fails=fails)
    assert losses == expected
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, tensors, strict=True))


@pytest.mark.gpu
def test_on_cuda_copies_run_beside_kernels():
    device = torch.device("cuda")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)) for _ in range(6)])
    for parameter in model.parameters():
        parameter.data = parameter.data.pin_memory()
    x = torch.randn(4096, 2048, device=device)
    with streamed(model, [str(number) for number in range(6)], device=device):
        model(x).mean().backward()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            model(x).mean().backward()
            torch.cuda.synchronize()
    ranges = {"HtoD": [], "DtoH": [], "kernel": []}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:  # an enum of C++: each is an object of its own
            kind = next((kind for kind in ("HtoD", "DtoH") if kind in event.name), "kernel")
            ranges[kind].append((event.time_range.start, event.time_range.end))
    for way in ("HtoD", "DtoH"):
        assert any(
            begin < end_of and begin_of < end for begin, end in ranges[way] for begin_of, end_of in ranges["kernel"]
        )


def test_streams_are_made_for_cuda_only():
    assert side_stream._stream_of(CPU) is None
