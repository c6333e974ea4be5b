"""Adam with low-bit moments equals the optimizer of torchao bit for bit, with fewer temporaries."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.memory.live import live_bytes
from plimsoll.memory.recorder import Recorder
from plimsoll.techniques.mechanisms import low_bit_adam
from plimsoll.techniques.mechanisms.low_bit_adam import LowBitAdam, table_of

BOTH = pytest.mark.parametrize("bits", [8, 4])
SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give(some, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in some:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def steps_of(optimizer, some, num_steps=4, first=0):
    for number in range(first, first + num_steps):
        give(some, number)
        optimizer.step()


@pytest.fixture
def small_parts(monkeypatch):
    """Make parts so small that a parameter of 76800 elements has several, the last one smaller."""
    monkeypatch.setattr(low_bit_adam, "_PART_ELEMENTS", {"cpu": 1 << 14})


@BOTH
@pytest.mark.parametrize("is_decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchaos_bit_for_bit(bits, is_decoupled, dtype, small_parts):
    """The parameters have whole blocks, fewer than 4096 elements, or a gradient that is not contiguous."""
    torchao_optim = pytest.importorskip("torchao.optim", reason="torchao, to compare with, is not installed")
    ours, theirs = (parameters((300, 256), (64,), (128, 512), dtype=dtype) for _ in range(2))
    own = LowBitAdam(ours, bits=bits, decoupled_weight_decay=is_decoupled, **SETTINGS)
    their = getattr(torchao_optim, f"Adam{'W' if is_decoupled else ''}{bits}bit")(theirs, **SETTINGS)
    for number in range(4):
        for some in (ours, theirs):
            give(some, number)
            some[2].grad = some[2].grad.t().contiguous().t()
        own.step()
        with torch.compiler.set_stance("force_eager"):
            their.step()
    assert all(map(torch.equal, ours, theirs))
    moments = their.state[theirs[0]]["exp_avg"], their.state[theirs[0]]["exp_avg_sq"]
    state = own.state[ours[0]]
    assert torch.equal(state["exp_avg_codes"], moments[0].codes.view(-1))
    assert torch.equal(state["exp_avg_sq_codes"], moments[1].codes.view(-1))
    assert torch.equal(state["exp_avg_scale"], moments[0].scale)


@BOTH
@pytest.mark.parametrize("has_sign", [True, False])
def test_every_number_gets_torchaos_code(bits, has_sign):
    """The numbers are those next to code boundaries, to the last bit, and others of every size."""
    pytest.importorskip("torchao.optim", reason="torchao, to compare with, is not installed")
    from torchao.optim import quant_utils
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    numbers, code, next_from = map(torch.tensor, table_of(bits, has_sign))
    kind = {8: OptimState8bit, 4: OptimState4bit}[bits]
    assert torch.equal(numbers, kind.zeros((256,), has_sign, 128, "cpu").qmap)
    least = next_from.unique()[:-1]
    assert len(least) == len(numbers) - 1 == 2**bits - 1
    small = torch.logspace(-9, 0, 10_000)
    near = [torch.nextafter(least, torch.tensor(end)) for end in (-2.0, 2.0)]
    shares = torch.cat([least, *near, numbers, small, -small, torch.zeros(1)]).clip(-1, 1)
    upper_bits = (shares.view(torch.int32) >> 16) & 0xFFFF
    found = code[upper_bits] + (shares >= next_from[upper_bits])
    expected = {8: quant_utils.quantize_8bit_with_qmap, 4: quant_utils.quantize_4bit_with_qmap}[bits](shares, numbers)
    assert torch.equal(found, expected)


@BOTH
def test_what_does_not_make_up_a_block_is_a_smaller_one(bits):
    """5000 elements are 19 blocks of 256 and 136 more, or 39 of 128 and 8. torchao keeps such a parameter in fp32."""
    some = parameters((50, 100))
    optimizer = LowBitAdam(some, bits=bits, **SETTINGS)
    steps_of(optimizer, some)
    state = optimizer.state[some[0]]
    assert len(state["exp_avg_codes"]) == 5000 * bits // 8
    assert len(state["exp_avg_scale"]) == {8: 20, 4: 40}[bits]
    left_over = 5000 % {8: 256, 4: 128}[bits]
    alone = nn.Parameter(parameters((50, 100))[0].detach().view(-1)[-left_over:].clone())
    plain = torch.optim.Adam([alone], **SETTINGS)
    give(some, 0)
    alone.grad = some[0].grad.view(-1)[-left_over:].clone()
    plain.step()
    first = parameters((50, 100))
    steps_of(LowBitAdam(first, bits=bits, **SETTINGS), first, num_steps=1)
    torch.testing.assert_close(first[0].detach().view(-1)[-left_over:], alone.detach())  # no moment was read yet


@pytest.mark.parametrize("shape", [(4095,), (4097,), (4096, 2)])
def test_few_numbers_odd_ones_and_those_in_another_order_keep_plain_moments(shape):
    (one,) = parameters(shape)
    if len(shape) == 2:
        one = nn.Parameter(one.detach().t())
    expected = nn.Parameter(one.detach().clone())
    optimizer, plain = LowBitAdam([one], bits=8, **SETTINGS), torch.optim.Adam([expected], **SETTINGS)
    steps_of(optimizer, [one])
    steps_of(plain, [expected])
    torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-7)
    assert set(optimizer.state[one]) == {"step", "exp_avg", "exp_avg_sq"}


def test_maximizing_goes_the_other_way_and_a_closure_is_called():
    ones = [parameters((64, 64)) for _ in range(2)]
    for some, maximizes in zip(ones, (True, False), strict=True):
        optimizer = LowBitAdam(some, bits=8, lr=1e-2, maximize=maximizes)
        give(some, 0)
        some[0].grad *= -1 if maximizes else 1
        assert optimizer.step(lambda: 7) == 7
    assert torch.equal(*(some[0] for some in ones))


def test_sparse_gradients_are_refused():
    (one,) = parameters((64, 64))
    one.grad = torch.zeros(64, 64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        LowBitAdam([one], bits=8).step()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_were_saved_go_on_bit_for_bit(bits, dtype, tmp_path):
    """They are read back from a checkpoint with weights_only, and codes stay bytes."""
    shapes = (64, 100), (10,)
    some = parameters(*shapes, dtype=dtype)
    optimizer = LowBitAdam([{"params": some[:1]}, {"params": some[1:], "lr": 1e-2}], bits=bits, **SETTINGS)
    steps_of(optimizer, some, num_steps=2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    others = [nn.Parameter(one.detach().clone()) for one in some]
    other = LowBitAdam([{"params": others[:1]}, {"params": others[1:]}], bits=bits)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert other.state[others[0]]["exp_avg_codes"].dtype == torch.uint8
    assert other.state[others[0]]["exp_avg_scale"].dtype == torch.float32
    steps_of(optimizer, some, first=2)
    steps_of(other, others, first=2)
    assert all(map(torch.equal, some, others))


def test_a_copy_of_it_goes_on_bit_for_bit():
    some = parameters((64, 100))
    optimizer = LowBitAdam(some, bits=4, **SETTINGS)
    steps_of(optimizer, some, num_steps=1)
    others, other = copy.deepcopy((some, optimizer))
    steps_of(optimizer, some, first=1)
    steps_of(other, others, first=1)
    assert torch.equal(some[0], others[0])


def taken_bytes(some, optimizer):
    """Return the peak of temporaries and the size of the states in an update, in bytes."""
    give(some, 9)
    known = [("", one) for parameter in some for one in (parameter, parameter.grad)]
    with Recorder(phase=lambda: "optimizer") as recorder:
        recorder.know(known, "parameters")
        recorder.know_optimizer(optimizer)
        recorder.step = 1
        optimizer.step()
    live = live_bytes(recorder.trace("measured", "cpu"))
    return int(live.by_category["temporaries"].max()), int(live.by_category["optimizer states"][-1])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(100, 1024), (65536,), (4095,), (77, 101)], ids=str)
def test_what_it_says_that_it_takes_is_enough_and_not_far_from_it(bits, dtype, shape, small_parts):
    some = parameters(shape, dtype=dtype)
    optimizer = LowBitAdam(some, bits=bits, maximize=True, **SETTINGS)
    steps_of(optimizer, some, num_steps=1)
    temporaries, states = taken_bytes(some, optimizer)
    assert states == optimizer.state_bytes_of(some[0])
    assert temporaries <= optimizer.temporary_bytes_of(some[0]) <= 3 * temporaries + 4096


def test_a_large_parameter_takes_no_more_than_one_part_of_it(small_parts):
    (one,) = parameters((512, 1024))
    optimizer = LowBitAdam([one], bits=8)
    steps_of(optimizer, [one], num_steps=1)
    assert taken_bytes([one], optimizer)[0] < one.nbytes / 3


def test_least_is_where_torchao_begins_to_round_up():
    """It is the middle of 1 and 2, or the smallest float that is at least half a gap above the lower number."""
    assert low_bit_adam._least(np.asarray([1, 2, 4], np.float32)).tolist() == [1.5, 3.0]
    below, above = np.float32(0.1), np.float32(0.7)
    (least,) = low_bit_adam._least(np.asarray([below, above]))
    half = (above - below) * np.float32(0.5)
    assert least - below >= half > np.nextafter(least, np.float32(0)) - below
