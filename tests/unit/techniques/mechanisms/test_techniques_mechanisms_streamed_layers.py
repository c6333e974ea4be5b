"""Blocks on copies of their parameters: the same bits with and without gradients, and at most two blocks copied."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plimsoll.device.cuda.gpus import find_gpu
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.predict import count_on_cuda
from plimsoll.memory.trace import dry_run
from plimsoll.planning.search.time_model import step_duration
from plimsoll.records.plan import Choice
from plimsoll.records.speed import Point, Speed
from plimsoll.techniques.mechanisms import streamed_layers
from plimsoll.techniques.mechanisms.blocks import blocks_of
from plimsoll.techniques.mechanisms.building import put_where_needed
from plimsoll.techniques.mechanisms.streamed_layers import streamable_parameters, streamed
from technique_trainings import TRAININGS

CPU = torch.device("cpu")


class Tower(nn.Module):
    """A row of blocks, each used ``times`` times, optionally checkpointed."""

    def __init__(self, num_blocks=5, width=16, times=1, is_checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 3)
        self.times, self.is_checkpointed = times, is_checkpointed

    def forward(self, x):
        for block in self.blocks:
            for _ in range(self.times):
                x = x + (checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x))
        return self.head(x)


def names_of(model):
    return [name for name, _ in blocks_of(model)]


def gradients_of(model, x, num_passes=2):
    model.zero_grad()
    for number in range(num_passes):
        torch.manual_seed(number)
        model(x).square().mean().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.fixture
def x():
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["saved", "checkpointed"])
def test_gradients_have_the_bits_of_plain_pytorch_and_land_on_the_parameters(x, times, is_checkpointed):
    torch.manual_seed(0)
    model = Tower(times=times, is_checkpointed=is_checkpointed)
    parameters, expected = [*model.parameters()], gradients_of(model, x)
    with streamed(model, names_of(model), device=CPU):
        found = gradients_of(model, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("training", ["gpt2", "bert", "t5"])
def test_models_of_transformers_too(training):
    case = TRAININGS[training]
    torch.manual_seed(0)
    model, batch = case.build(dropout=0.1).train(), case.batches()[0]
    other = copy.deepcopy(model)
    with streamed(other, names_of(other), device=CPU):
        for one in (model, other):
            torch.manual_seed(1)
            one(**batch).loss.backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name


@pytest.fixture
def made(monkeypatch):
    """Return weak references to the copies, and the largest number of copies alive at once."""
    alive, most, plain = [], [0], torch.empty_strided

    def noted(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        alive.append(weakref.ref(tensor))
        gc.collect()
        most[0] = max(most[0], sum(one() is not None for one in alive))
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(streamed_layers.torch, "empty_strided", noted)
        patch.setattr(streamed_layers.PinnedPool, "empty_like", lambda self, tensor, device: torch.empty_like(tensor))
        yield alive, most


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["saved", "checkpointed"])
def test_at_most_two_blocks_are_there_and_none_after_backward(x, made, is_checkpointed):
    alive, most = made
    model = Tower(is_checkpointed=is_checkpointed)
    with streamed(model, names_of(model), device=CPU):
        model(x).mean().backward()
        assert most[0] == 2 * 4  # parameters of a block
        assert not any(one() is not None for one in alive)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["saved", "checkpointed"])
def test_each_block_is_copied_once_in_forward_and_once_in_backward(x, made, is_checkpointed):
    alive, _ = made
    model = Tower(is_checkpointed=is_checkpointed)
    with streamed(model, names_of(model), device=CPU):
        model(x).mean().backward()
    assert len(alive) == 2 * 5 * 4


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_without_gradients_homes_may_be_anywhere_and_the_model_empty(x, made, is_cyclic):
    model, pool = Tower().eval(), MappedPool()
    homes = {name: pool.copy_of(one) for name, one in model.named_parameters()}
    with torch.no_grad():
        expected = model(x)
        for name in names_of(model):
            model.get_submodule(name).to_empty(device="meta")
        with streamed(
            model, names_of(model), device=CPU, home_of=lambda name, parameter: homes[name], is_cyclic=is_cyclic
        ):
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)
    assert len(made[0]) == (2 * 5 + is_cyclic) * 4
    assert model.blocks[0][0].weight.is_meta


def test_a_change_of_the_home_is_seen_by_the_next_pass(x):
    model = Tower().eval()
    with torch.no_grad(), streamed(model, names_of(model), device=CPU, is_cyclic=True):
        before = model(x)
        model.blocks[0][0].weight.mul_(2)
        assert not torch.equal(model(x), before)
        assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_after_an_error_in_a_block_nothing_is_kept_and_the_parameters_are_back(x, made):
    model = Tower()

    def fail(*args):
        raise MemoryError("no room")

    handle = model.blocks[2][1].register_forward_hook(fail)
    with streamed(model, names_of(model), device=CPU):
        with pytest.raises(MemoryError):
            model(x)
        assert isinstance(model.blocks[2][0].weight, nn.Parameter)
        gc.collect()
        assert not any(one() is not None for one in made[0])
        handle.remove()
        model(x).mean().backward()


def test_what_is_shared_with_the_rest_of_the_model_stays():
    model = Tower()
    model.head.weight = nn.Parameter(torch.randn(3, 16))
    model.blocks[0][0].bias = nn.Parameter(torch.zeros(32))
    model.extra = nn.Linear(16, 32)
    model.extra.bias = model.blocks[0][0].bias
    model.blocks[1][0].weight = model.blocks[2][0].weight
    streamable = streamable_parameters(model, names_of(model))
    assert model.blocks[0][0].bias not in streamable
    assert model.head.weight not in streamable
    assert model.blocks[1][0].weight in streamable  # of two blocks that are both streamed
    assert model.blocks[1][0].weight not in streamable_parameters(model, ["blocks.1"])


def test_parameters_shared_between_blocks_get_the_gradient_of_both(x):
    model = Tower()
    model.blocks[1][0].weight = model.blocks[3][0].weight
    expected = gradients_of(model, x)
    with streamed(model, names_of(model), device=CPU):
        found = gradients_of(model, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def seconds_of_a_pass(stream, link_rate, is_checkpointed=False):
    """Return the time of a pass in which a kernel takes a second, calls take no time, and the link is slow."""
    lowering = CudaLowering((8, 6))
    with dry_run(lowering, lambda: "forward") as stage:
        model = Tower(num_blocks=NUM_BLOCKS, is_checkpointed=is_checkpointed)
        put_where_needed(model, lowering.device, [STREAMED] if stream else [])
        stage.recorder.step = 1
        with streamed(model, names_of(model), device=CPU) if stream else nullcontext():
            loss = model(torch.randn(6, 16, device=lowering.device)).mean()
            with stage.recorder.phase("backward"):
                loss.backward()
    counted = count_on_cuda(stage.trace(), find_gpu("rtx3060"))
    speed = KERNELS_OF_A_SECOND.model_copy(update={"link_bytes_per_second": link_rate})
    return step_duration(counted, speed, batch_size=1, micro_batch=1, dry_run_samples=1).likely_seconds


NUM_BLOCKS, BLOCK_BYTES = 6, 4 * (16 * 32 + 32 + 32 * 16 + 16)
STREAMED = Choice(technique="layer_streaming", options={"blocks": "all"})
INFINITE = (Point(at=1, rate=1e30),)
KERNELS_OF_A_SECOND = Speed(
    device="by hand", source="measured", flops_per_second={"float32": INFINITE}, bytes_per_second={"plain": INFINITE},
    op_seconds=0, module_op_seconds=0, backward_op_seconds=0, kernel_seconds=1, link_bytes_per_second=1,
    host_bytes_per_second=1e30, overlaps=True, spread=0,
)  # fmt: skip


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["saved", "checkpointed"])
def test_copies_are_hidden_behind_blocks_that_take_longer_and_waited_for_where_the_link_is_slow(is_checkpointed):
    plain = seconds_of_a_pass(stream=False, link_rate=1, is_checkpointed=is_checkpointed)
    num_brought, to_begin = 2 * NUM_BLOCKS, 4  # in forward and in backward; a second for each parameter
    fast = seconds_of_a_pass(True, BLOCK_BYTES / 0.5, is_checkpointed) - plain
    assert 0 < fast < 5 * (to_begin + 0.5)  # the first block in forward, the last in backward, the last gradients
    slow = seconds_of_a_pass(True, BLOCK_BYTES / (20 * plain), is_checkpointed)
    assert num_brought * 20 < slow / plain < (num_brought + 2) * 20 + 1  # gradients go the other way meanwhile


@pytest.mark.gpu
def test_on_cuda_pinned_parameters_train_as_on_the_device(x):
    model = Tower()
    on_device, x_there = copy.deepcopy(model).cuda(), x.detach().cuda()
    model.head.cuda()
    for name in names_of(model):
        for parameter in model.get_submodule(name).parameters():
            parameter.data = parameter.data.pin_memory()
    expected = gradients_of(on_device, x_there)
    with streamed(model, names_of(model), device=torch.device("cuda")):
        found = gradients_of(model, x_there)
    assert all(torch.equal(found[name].cpu(), expected[name].cpu()) for name in expected)
    assert model.blocks[0][0].weight.grad.is_cpu
