"""Weights in codes of 8 and 4 bits: their error, and the values that 4 bits represent."""

import pytest
import torch

from plimsoll.techniques.mechanisms.codes import CODECS, NF4_VALUES


def decoded(base, weight):
    codes, scale = CODECS[base].encode(weight)
    return CODECS[base].decode(codes, scale, torch.float32), codes, scale


def test_eight_bits_are_off_by_half_a_step_of_the_channel_at_most():
    weight = torch.randn(30, 20) * torch.logspace(-3, 3, 30)[:, None]
    weight[4].zero_()
    dense, codes, scale = decoded("int8", weight)
    assert codes.dtype == torch.int8
    assert scale.shape == (30, 1)
    assert ((dense - weight).abs() <= 0.5001 * scale).all()
    torch.testing.assert_close(dense.abs().amax(1), weight.abs().amax(1))


@pytest.mark.parametrize(("num_inputs", "num_groups"), [(128, 2), (64, 1), (48, 3), (6, 3)])
def test_four_bits_are_the_nearest_of_sixteen_values_times_the_group_s_largest(num_inputs, num_groups):
    weight = torch.randn(10, num_inputs) * torch.logspace(-3, 3, 10)[:, None]
    weight[4].zero_()
    dense, codes, scale = decoded("nf4", weight)
    assert (codes.dtype, codes.shape, scale.shape) == (torch.uint8, (10, num_inputs // 2), (10, num_groups))
    groups = weight.view(10, num_groups, -1)
    largest = groups.abs().amax(2, keepdim=True)
    choices = largest[..., None] * torch.tensor(NF4_VALUES)
    nearest = (groups[..., None] - choices).abs().amin(-1)
    torch.testing.assert_close((dense.view_as(groups) - groups).abs(), nearest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_what_it_can_stand_for_comes_back_as_it_was(base):
    values = torch.tensor(NF4_VALUES) if base == "nf4" else torch.arange(-127, 128).float()[: 254 // 2 * 2]
    weight = values.repeat(3, 4)
    weight = torch.cat([weight, -weight[:, :1] * 0 + weight.abs().max()], dim=1)[:, : values.numel() * 4]
    dense, _, _ = decoded(base, weight)
    torch.testing.assert_close(dense, weight)


def test_normal_weights_lose_less_in_sixteen_quantiles_than_in_sixteen_steps():
    """This is the paper's reason for these values, with a scale for each group."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    dense, _, _ = decoded("nf4", weight)
    groups = weight.view(256, 8, 64)
    step = groups.abs().amax(2, keepdim=True) / 7
    even = ((groups / step).round() * step).view_as(weight)
    assert (dense - weight).square().mean() < 0.85 * (even - weight).square().mean()


@pytest.mark.parametrize(("shape", "can"), [((3, 64), True), ((3, 80), True), ((3, 24), False), ((0, 64), False)])
def test_four_bits_are_never_more_than_six(shape, can):
    weight = torch.ones(shape)
    assert CODECS["nf4"].can_encode(weight) == can
    if can:
        codes, scale = CODECS["nf4"].encode(weight)
        assert 8 * (codes.nbytes + scale.nbytes) <= 6 * weight.numel()


def test_nf4_s_values_are_the_paper_s():
    assert len(NF4_VALUES) == 16
    assert (NF4_VALUES[0], NF4_VALUES[7], NF4_VALUES[15]) == (-1.0, 0.0, 1.0)
    assert list(NF4_VALUES) == sorted(NF4_VALUES)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_what_decoding_takes_for_a_moment_is_the_dense_weight_and_little_more(base):
    codes, scale = CODECS[base].encode(torch.randn(512, 1024))
    dense = CODECS[base].decode(codes, scale, torch.bfloat16)
    assert dense.dtype == torch.bfloat16
    assert codes.numel() * codes.element_size() + scale.numel() * 4 <= 512 * 1024 * (1.01 if base == "int8" else 0.57)
