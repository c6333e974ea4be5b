"""torch's recurrent layers run forward and backward, and comparisons of their results."""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

INPUTS, HIDDEN = 5, 6
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
LAYERS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


def tensors(shape, dtype, seed):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def first_state(layer, num_samples, dtype):
    """Return a state that requires a gradient; two tensors for an LSTM."""
    rows = layer.num_layers * (1 + layer.bidirectional)
    widths = [layer.proj_size or HIDDEN] + [HIDDEN] * isinstance(layer, nn.LSTM)
    shapes = [(rows, *num_samples, width) for width in widths]
    parts = [tensors(shape, dtype, 7 + number).requires_grad_() for number, shape in enumerate(shapes)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def parts_of(hidden):
    return hidden if isinstance(hidden, tuple) else (hidden,)


def everything(layer, inputs, lengths=None, has_state=True, dtype=torch.float64, seed=3, is_sorted=False):
    """Run forward and backward; return outputs, last states, and the gradients of inputs, state and weights."""
    inputs = inputs.clone().requires_grad_()
    batch_dim = 0 if layer.batch_first else 1
    state = (
        first_state(layer, inputs.shape[batch_dim : batch_dim + 1] * (inputs.dim() == 3), dtype) if has_state else None
    )
    given_inputs = inputs
    if lengths is not None:
        given_inputs = pack_padded_sequence(inputs, lengths, layer.batch_first, enforce_sorted=is_sorted)
    torch.manual_seed(seed)
    outputs, last = layer(given_inputs, state)
    if lengths is not None:
        assert isinstance(outputs, PackedSequence)
        outputs, _ = pad_packed_sequence(outputs, layer.batch_first)
    found = [outputs, *parts_of(last)]
    loss = sum((one * tensors(one.shape, dtype, 11)).sum() for one in found)
    wanted = [inputs, *(parts_of(state) if has_state else ()), *layer.parameters()]
    return [one.detach() for one in found] + list(torch.autograd.grad(loss, wanted))


def require_alike(found, expected, dtype=torch.float64):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        scale = other.detach().abs().max().clamp(min=1e-30)
        assert float(((one - other).abs().max() / scale).detach()) <= TOLERANCES[dtype]
