"""Recurrent layers of torch in segments against the unchanged layers: outputs, states and all gradients."""

import copy
import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from layer_runs import HIDDEN, INPUTS, LAYERS, TOLERANCES, everything, require_alike, tensors
from plimsoll.techniques.mechanisms.recurrent_layers import Cut, SegmentedLayer, is_plain_layer
from processor import skip_without_half_lstm

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def twins(name, dtype=torch.float64, cut=(3, 0), **options):
    """Return a layer, and its copy that runs in segments."""
    torch.manual_seed(0)
    plain = LAYERS[name](INPUTS, HIDDEN, **options).to(dtype)
    segmented = copy.deepcopy(plain)
    segmented.forward = SegmentedLayer(segmented, Cut(*cut))
    return plain, segmented


def lengths_of(num_samples, num_steps):
    return torch.tensor([max(1, num_steps - 4 * sample) for sample in range(num_samples)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("name", "num_layers", "bidirectional"), list(product(LAYERS, (1, 2), (False, True))))
def test_the_gradients_are_those_of_the_layer(name, num_layers, bidirectional, dtype):
    projections = (0, 4) if name == "lstm" else (0,)
    for batch_first, bias, is_packed, proj_size in product((False, True), (True, False), (False, True), projections):
        kept = 2 if bias else 0
        options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
        options |= {"proj_size": proj_size} if proj_size else {}
        plain, segmented = twins(name, dtype, (3, kept), **options)
        inputs = tensors((4, 13, INPUTS) if batch_first else (13, 4, INPUTS), dtype, 1)
        lengths = lengths_of(4, 13) if is_packed else None
        expected = everything(plain, inputs, lengths, dtype=dtype)
        require_alike(everything(segmented, inputs, lengths, dtype=dtype), expected, dtype)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(LAYERS)),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    steps=st.integers(0, 30),
    kept=st.integers(0, 4),
    bidirectional=st.booleans(),
    has_state=st.booleans(),
    is_sorted=st.booleans(),
)
def test_any_lengths_and_any_cut(name, lengths, steps, kept, bidirectional, has_state, is_sorted):
    plain, segmented = twins(name, cut=(steps, kept), bidirectional=bidirectional, num_layers=2)
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    inputs = tensors((max(lengths), len(lengths), INPUTS), torch.float64, 2)
    options = {"lengths": torch.tensor(lengths), "has_state": has_state, "is_sorted": is_sorted}
    require_alike(everything(segmented, inputs, **options), everything(plain, inputs, **options))
    options = {"has_state": has_state}
    require_alike(everything(segmented, inputs, **options), everything(plain, inputs, **options))


@pytest.mark.parametrize("name", LAYERS)
def test_one_sequence_without_a_batch(name):
    plain, segmented = twins(name, num_layers=2, batch_first=True)
    inputs = tensors((13, INPUTS), torch.float64, 1)
    require_alike(everything(segmented, inputs), everything(plain, inputs))


def by_layers(layer, inputs, spans, masks):
    """Run two layers with the given dropout masks between them in plain PyTorch, over the whole sequence."""
    first, second = ((layer._flat_weights[4 * n : 4 * n + 4]) for n in (0, 1))
    kernel = torch._VF.lstm
    zeros = torch.zeros(1, inputs.shape[1], HIDDEN, dtype=inputs.dtype)
    middle, *_ = kernel(inputs, (zeros, zeros), first, True, 1, 0.0, True, False, False)
    assert len(spans) == len(masks)
    return kernel(middle * torch.cat(masks), (zeros, zeros), second, True, 1, 0.0, True, False, False)[0]


def test_with_the_same_masks_dropout_has_the_gradients_of_plain_pytorch():
    """The masks are drawn segment by segment, and applied to the whole sequence at once."""
    plain, segmented = twins("lstm", num_layers=2, dropout=0.4)
    inputs = tensors((13, 4, INPUTS), torch.float64, 1)
    spans = Cut(3).spans(13)
    torch.manual_seed(3)
    masks = [functional.dropout(torch.ones(length, 4, HIDDEN, dtype=torch.float64), 0.4) for _, length in spans]
    torch.manual_seed(3)
    outputs, _ = segmented(inputs)
    weights = tensors(outputs.shape, torch.float64, 5)
    found = torch.autograd.grad((outputs * weights).sum(), list(segmented.parameters()))
    expected_outputs = by_layers(plain, inputs, spans, masks)
    expected = torch.autograd.grad((expected_outputs * weights).sum(), list(plain.parameters()))
    require_alike([outputs, *found], [expected_outputs, *expected])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_is_none_in_evaluation(bidirectional):
    plain, segmented = twins("gru", num_layers=2, dropout=0.4, bidirectional=bidirectional)
    inputs = tensors((13, 4, INPUTS), torch.float64, 1)
    require_alike(everything(segmented.eval(), inputs), everything(plain.eval(), inputs))


def test_under_autocast():
    skip_without_half_lstm()
    plain, segmented = twins("lstm", torch.float32, num_layers=2)
    inputs = tensors((13, 4, INPUTS), torch.float32, 1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = everything(plain, inputs, dtype=torch.float32, has_state=False)
        found = everything(segmented, inputs, dtype=torch.float32, has_state=False)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float(((one.float() - other.float()).norm() / other.float().norm()).detach()) < 0.03


def test_a_wrong_input_is_refused_as_torch_does():
    plain, segmented = twins("lstm")
    for wrong in (torch.zeros(2, 3, 4).double(), torch.zeros(2, 3, 4, 5).double()):
        with pytest.raises((RuntimeError, ValueError)) as expected:
            plain(wrong)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            segmented(wrong)


def test_a_copy_of_a_model_has_its_own_layer():
    _, segmented = twins("lstm")
    other = copy.deepcopy(segmented)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert float(other(torch.ones(7, 1, INPUTS).double())[0].detach().abs().max()) == 0.0
    assert float(segmented(torch.ones(7, 1, INPUTS).double())[0].detach().abs().max()) > 0.0


class Own(nn.LSTM):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


def test_a_layer_with_its_own_forward_is_left_alone():
    assert is_plain_layer(nn.GRU(1, 1))
    assert not is_plain_layer(Own(1, 1))
    assert not is_plain_layer(nn.LSTMCell(1, 1))


def test_a_cut_is_the_square_root_or_what_is_quick_unless_it_is_said():
    assert Cut(0).spans(10) == ((0, 4), (4, 4), (8, 2))
    assert [Cut(0).spans(steps)[0][1] for steps in (1, 100, 1000, 10_000, 40_000)] == [1, 25, 128, 128, 200]
    assert Cut(5).spans(10) == ((0, 5), (5, 5))
    assert Cut(99).spans(10) == ((0, 10),)
    assert Cut(5).num_slots is None
    assert Cut(5, 2).num_slots == 2


def test_one_tensor_as_hidden_and_cell_state():
    plain, segmented = twins("lstm")
    inputs, first = tensors((7, 2, INPUTS), torch.float64, 1), tensors((1, 2, HIDDEN), torch.float64, 2)
    require_alike([segmented(inputs, (first, first))[0]], [plain(inputs, (first, first))[0]])


def test_weights_are_those_of_now():
    """Current weights also include parametrized ones, and weights set by `functional_call`."""
    plain, segmented = twins("lstm")
    inputs = tensors((7, 2, INPUTS), torch.float64, 1)
    for layer in (plain, segmented):
        torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    require_alike(everything(segmented, inputs), everything(plain, inputs))
    with torch.no_grad():
        for layer in (plain, segmented):
            layer.parametrizations.weight_hh_l0.original0.mul_(10)
    require_alike([segmented(inputs)[0]], [plain(inputs)[0]])
    _, other = twins("lstm")
    zeros = {name: torch.zeros_like(parameter) for name, parameter in other.named_parameters()}
    assert not torch.func.functional_call(other, zeros, (inputs,))[0].any()


def test_no_steps_are_refused_as_torch_does():
    plain, segmented = twins("lstm")
    for layer in (plain, segmented):
        with pytest.raises(RuntimeError, match="larger than 0"):
            layer(torch.zeros(0, 2, INPUTS).double())


def test_in_inference_mode():
    plain, segmented = twins("gru")
    inputs = tensors((7, 2, INPUTS), torch.float64, 1)
    with torch.inference_mode():
        require_alike([segmented(inputs)[0]], [plain(inputs)[0]])
