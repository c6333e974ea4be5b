"""Recurrent layers on CUDA: one cuDNN kernel with its reserve, or a fused cell for each step without cuDNN.

On a CPU, torch unrolls ``nn.LSTM`` or calls oneDNN. On CUDA it calls cuDNN, which keeps an opaque *reserve* from
forward to backward and uses a *workspace* for each call. The methods of `CudnnRnn` replace ``aten`` ops. They allocate
the same tensors as ``aten/src/ATen/native/cudnn/RNN.cpp``, in the same order, and compute nothing. The sizes of cuDNN's
two buffers are not published: `cudnn_rnn_sizes` estimates them, with a range.

Does NOT cover: the copy of the reserve in ``backward(retain_graph=True)``, double backward, a packed sequence without
cuDNN, and padding inside the weight buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plimsoll.errors import InputError, JobError
from plimsoll.memory.lowering.cudnn_rnn_sizes import (
    Cell,
    RnnShape,
    reserve_bytes,
    uncertainty_bytes,
    workspace_bytes,
)
from plimsoll.memory.work import add_work

Note = Callable[[str, int, int], None]

_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
# torch.backends.cudnn.CUDNN_TENSOR_DTYPES lacks bfloat16, so bfloat16 weights are never flattened.
_FLATTENED_DTYPES = (torch.float16, torch.float32, torch.float64)
DROPOUT_STATE_BYTES = 132 * 48 * 1024  # on an H200: 48 bytes for each thread of 132 multiprocessors
_DROPOUT_STATE_LOW_BYTES, _DROPOUT_STATE_HIGH_BYTES = 20 * 48 * 1024, 192 * 48 * 1024
MOST_STEPS = 65_535
"""Most steps of one call. Longer calls fail with CUDNN_STATUS_NOT_SUPPORTED, which torch does not catch
(pytorch#133751, an LSTM in torch 2.4; users report that a GRU runs with 65,400 steps and fails with 65,600)."""


def shape_of(module: nn.RNNBase, num_steps: int, batch: int) -> RnnShape:
    """Return the shape of one call of a recurrent module, from which the sizes of cuDNN's buffers follow."""
    cell: Cell = module.mode.lower()  # type: ignore[assignment]
    return RnnShape(
        cell,
        num_steps,
        batch,
        module.input_size,
        module.hidden_size,
        module.proj_size,
        module.num_layers,
        module.bidirectional,
        next(module.parameters()).element_size(),
        bool(module.dropout) and module.num_layers > 1,
    )


@contextmanager
def weights_flattened(on_host: Callable[[Tensor], bool]) -> Iterator[None]:
    """Make ``flatten_parameters`` work as on CUDA for weights that are not on the host, until the context exits.

    The parameters of a layer then share one storage. So do their gradients after a backward pass.
    """
    original = nn.RNNBase.flatten_parameters

    def flatten(module: nn.RNNBase) -> None:
        if all(isinstance(weight, nn.Parameter) and not on_host(weight) for weight in module._flat_weights):
            _flatten(module)

    nn.RNNBase.flatten_parameters = flatten  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = original  # type: ignore[method-assign]


def _flatten(module: nn.RNNBase) -> bool:
    weights = [weight for weight in module._flat_weights if isinstance(weight, nn.Parameter)]
    storages = {weight.untyped_storage()._cdata for weight in weights}
    dtypes = {weight.dtype for weight in weights}
    if len(storages) != len(module._flat_weights) or len(dtypes) != 1 or not dtypes < set(_FLATTENED_DTYPES):
        return False
    with torch.no_grad():
        buffer = torch.zeros(shape_of(module, 1, 1).weight_elements, dtype=weights[0].dtype, device=weights[0].device)
        for weight, view in zip(weights, _views(buffer, weights), strict=True):
            weight.set_(view)  # type: ignore[call-overload]
    return True


def _views(buffer: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a slice of a buffer for each weight. RNN.cpp uses ``set_``, whose storage a fake mode would keep alive."""
    start = 0
    for weight in weights:
        yield buffer[start : start + weight.numel()].view(weight.shape)
        start += weight.numel()


class _Call(NamedTuple):
    """The shape and options of one call of ``_cudnn_rnn``."""

    shape: RnnShape
    train: bool
    batch_first: bool
    packed: bool
    has_biases: bool
    weights_are_cast: bool = False

    def time_first(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1) if self.batch_first and not self.packed else tensor

    def workspace(self, like: Tensor) -> Tensor:
        return like.new_empty(workspace_bytes(self.shape).likely, dtype=torch.uint8)

    def note_products(self, like: Tensor) -> None:
        """Record the matrix products of a call: each weight is used for each token, and read once per time step."""
        shape = self.shape
        flops = 2 * shape.num_steps * shape.batch * shape.weight_elements
        add_work(flops, shape.num_steps * shape.weight_elements * like.element_size())

    def reserve(self, like: Tensor) -> Tensor:
        return like.new_empty(reserve_bytes(self.shape).likely if self.train else 0, dtype=torch.uint8)


class _CudnnRnnFunction(torch.autograd.Function):
    """Autograd function of ``_cudnn_rnn``: the same tensors are allocated and freed in the same order as in RNN.cpp."""

    @staticmethod
    def forward(ctx: Any, call: _Call, inputs: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        x = call.time_first(inputs).contiguous()
        call.note_products(x)
        output = x.new_empty(*x.shape[:-1], call.shape.num_outputs * call.shape.num_directions)
        hy = torch.empty_like(hx)
        cy = None if cx is None else torch.empty_like(cx)
        # Without `weights_flattened`, every call copies the weights into a buffer and saves it for backward.
        # `_cudnn_rnn_cast_reflatten` casts all weights into one buffer. Here, each cast is a separate tensor; the total
        # size is equal.
        has_buffer = call.weights_are_cast or _are_flat(weights, inputs.dtype)
        buffer = None if has_buffer else x.new_zeros(call.shape.weight_elements)
        workspace = call.workspace(x)
        reserve = call.reserve(x)
        del workspace, x
        output = call.time_first(output)
        ctx.save_for_backward(inputs, hx, cx, output, buffer, reserve, *weights)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _Call = ctx.call
        inputs, hx, cx, output, _buffer, _reserve, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if not call.train:
            raise RuntimeError(
                "cudnn RNN backward can only be called in training mode: call model.train() before the forward pass"
            )
        if all(grad is None for grad in grads):
            return (None,) * len(needed)
        # Allocated in `_cudnn_rnn_backward`, so they are freed when it ends.
        likes = (output, hx) if cx is None else (output, hx, cx)
        gradients = [
            torch.zeros_like(like, memory_format=torch.contiguous_format) if grad is None else grad
            for grad, like in zip(grads, likes, strict=False)
        ]
        dx, dhx, dcx = _backward_data(call, (inputs, hx, cx), gradients)
        dw = _backward_weights(call, inputs, weights) if any(needed[4:]) else [None] * len(weights)
        wanted = [grad if need else None for grad, need in zip([dx, dhx, dcx, *dw], needed[1:], strict=True)]
        return (None, *wanted)


def _backward_data(call: _Call, saved: Sequence[Any], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    inputs, hx, cx = saved
    kept = [call.time_first(inputs).contiguous(), call.time_first(grads[0]).contiguous()]
    call.note_products(inputs)
    dx = torch.empty_like(kept[0])
    kept += [grad.contiguous() for grad in grads[1:]]
    dhx = torch.empty_like(hx)
    dcx = None if cx is None else torch.empty_like(cx)
    kept.append(call.workspace(inputs))
    return call.time_first(dx), dhx, dcx


def _backward_weights(call: _Call, inputs: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    kept = [call.time_first(inputs).contiguous()]
    call.note_products(inputs)
    buffer = inputs.new_zeros(call.shape.weight_elements)
    kept.append(call.workspace(inputs))
    views = list(_views(buffer, weights))
    if not call.has_biases:  # the buffer also has biases, so RNN.cpp copies the weights
        return [torch.empty_like(weight).copy_(view) for weight, view in zip(weights, views, strict=True)]
    return [view.to(weight.dtype) for weight, view in zip(weights, views, strict=True)]


def _are_flat(weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return len({weight.untyped_storage()._cdata for weight in weights}) == 1 and weights[0].dtype == dtype


class _FusedLstmCell(torch.autograd.Function):
    """Autograd function of ``_thnn_fused_lstm_cell``. It saves a [B, 4H] workspace, its inputs and the new cell state.

    It replaces torch's meta kernel, which fails without biases.
    """

    @staticmethod
    def forward(ctx: Any, igates: Tensor, hgates: Tensor, cx: Tensor, *biases: Tensor | None) -> Any:
        workspace = torch.empty_like(igates, memory_format=torch.contiguous_format)
        hy, cy = (torch.empty_like(cx, memory_format=torch.contiguous_format) for _ in range(2))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(igates, hgates, cx, cy, *biases, workspace)
        return hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _igates, _hgates, cx, _cy, b_ih, _b_hh, workspace = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * 5
        grad_gates, grad_cx = torch.empty_like(workspace), torch.empty_like(cx)
        grad_bias = None if b_ih is None else grad_gates.sum(0)
        return grad_gates, grad_gates, grad_cx, grad_bias, grad_bias


class _FusedGruCell(torch.autograd.Function):
    """Autograd function of ``_thnn_fused_gru_cell``. It saves a [B, 5H] workspace, and its inputs for double backward.

    torch has no meta kernel for it.
    """

    @staticmethod
    def forward(ctx: Any, igates: Tensor, hgates: Tensor, hx: Tensor, *biases: Tensor | None) -> Tensor:
        workspace = hx.new_empty(hx.shape[0], hx.shape[1] * 5)
        hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
        ctx.save_for_backward(igates, hgates, hx, *biases, workspace)
        return hy

    @staticmethod
    def backward(ctx: Any, grad_hy: Tensor) -> Any:
        igates, hgates, _hx, b_ih, _b_hh, _workspace = ctx.saved_tensors
        grad_hy = grad_hy.contiguous()
        dig, dhg, dhx = torch.empty_like(igates), torch.empty_like(hgates), torch.empty_like(grad_hy)
        biases = (None, None) if b_ih is None else (dig.sum(0), dhg.sum(0))
        return dig, dhg, dhx, *biases


def _lstm_cell(x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    assert w_ih is not None
    assert w_hh is not None
    gates = x @ w_ih.t(), state[0] @ w_hh.t()
    hy, cy = _FusedLstmCell.apply(*gates, state[1], b_ih, b_hh)  # type: ignore[no-untyped-call]
    return (hy if w_hr is None else hy @ w_hr.t()), cy


def _gru_cell(x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor | None]) -> tuple[Tensor]:
    w_ih, w_hh, b_ih, b_hh, _w_hr = weights
    assert w_ih is not None
    assert w_hh is not None
    return (_FusedGruCell.apply(x @ w_ih.t(), state[0] @ w_hh.t(), state[0], b_ih, b_hh),)  # type: ignore[no-untyped-call]


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor]]:
    def cell(x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor | None]) -> tuple[Tensor]:
        w_ih, w_hh, b_ih, b_hh, _w_hr = weights
        linear = nn.functional.linear
        return (activation(linear(state[0], w_hh, b_hh).add_(linear(x, w_ih, b_ih))),)  # type: ignore[arg-type]

    return cell


_CELLS: dict[Cell, Callable[..., tuple[Tensor, ...]]] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _rnn_cell(torch.tanh),
    "rnn_relu": _rnn_cell(torch.relu),
}
_PADDED = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("data", "batch_sizes", *_PADDED[1:-1])


class _Arguments(NamedTuple):
    """Named arguments of ``torch.lstm`` and similar functions, for both overloads.

    ``batch_sizes`` is ``None`` if the input is not packed.
    """

    cell: Cell
    inputs: Tensor
    batch_sizes: Tensor | None
    states: Sequence[Tensor]
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @classmethod
    def of(cls, cell: Cell, args: Sequence[Any], kwargs: dict[str, Any]) -> _Arguments:
        # The third argument (the second for an LSTM) is a list in the padded overload and a tensor in the packed one.
        position = 1 if cell == "lstm" else 2
        packed = "batch_sizes" in kwargs or (len(args) > position and isinstance(args[position], Tensor))
        given = dict(zip(_PACKED if packed else _PADDED, args, strict=False)) | kwargs
        hx = given.pop("hx")
        inputs = given.pop("data" if packed else "input")
        return cls(cell, inputs, given.pop("batch_sizes", None), hx if cell == "lstm" else [hx], **given)

    @property
    def num_steps(self) -> int:
        """T, the number of time steps; for a packed batch, the longest length."""
        if self.batch_sizes is not None:
            return self.batch_sizes.shape[0]
        return self.inputs.shape[1 if self.batch_first else 0]

    def shape(self, dtype: torch.dtype) -> RnnShape:
        hidden_size, output_size = self.states[-1].shape[2], self.states[0].shape[2]
        return RnnShape(
            self.cell,
            self.num_steps,
            self.states[0].shape[1],
            self.inputs.shape[-1],
            hidden_size,
            output_size if output_size != hidden_size else 0,
            self.num_layers,
            self.bidirectional,
            dtype.itemsize,
            self.train and self.dropout > 0 and self.num_layers > 1,
            None if self.batch_sizes is None else self.inputs.shape[0],
        )

    def weights_by_layer(self) -> list[tuple[Tensor | None, ...]]:
        """Return (w_ih, w_hh, b_ih, b_hh, w_hr) for each layer and direction, with None for missing weights."""
        count = len(self.params) // (self.num_layers * (2 if self.bidirectional else 1))
        groups = [self.params[i : i + count] for i in range(0, len(self.params), count)]
        num_biases = 2 if self.has_biases else 0
        return [
            (*g[:2], *(g[2:4] if num_biases else (None, None)), g[2 + num_biases] if count > 2 + num_biases else None)
            for g in groups
        ]


def _cell_weights(weights: Sequence[Tensor | None], named: dict[str, Tensor | None]) -> list[Tensor | None]:
    given = dict(zip(("w_ih", "w_hh", "b_ih", "b_hh"), weights, strict=False)) | named
    return [given.get(name) for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")]


class CudnnRnn:
    """Replacements for torch's recurrent functions during a trace.

    Use one object per trace, because it keeps cuDNN's dropout state.

    Args:
        note: called as ``note(text, less_bytes, more_bytes)`` for every forward call whose sizes are estimates. The
            call may use up to that many bytes less or more than was traced.
        has_bfloat16: whether the card and cuDNN support bfloat16 in recurrent layers.
    """

    def __init__(self, note: Note, has_bfloat16: bool = True) -> None:
        self._note = note
        self._dtypes = _CUDNN_DTYPES if has_bfloat16 else _FLATTENED_DTYPES  # needs sm_80 and cuDNN 9.13
        self._dropout_state: Tensor | None = None

    def lstm(self, *args: Any, **kwargs: Any) -> Any:
        """Replace ``torch.lstm``, and return output, h and c."""
        return self._layers(_Arguments.of("lstm", args, kwargs))

    def gru(self, *args: Any, **kwargs: Any) -> Any:
        """Replace ``torch.gru``, and return output and h."""
        return self._layers(_Arguments.of("gru", args, kwargs))

    def rnn_tanh(self, *args: Any, **kwargs: Any) -> Any:
        """Replace ``torch.rnn_tanh``, and return output and h."""
        return self._layers(_Arguments.of("rnn_tanh", args, kwargs))

    def rnn_relu(self, *args: Any, **kwargs: Any) -> Any:
        """Replace ``torch.rnn_relu``, and return output and h."""
        return self._layers(_Arguments.of("rnn_relu", args, kwargs))

    def lstm_cell(self, input: Tensor, hx: Sequence[Tensor], *weights: Tensor | None, **named: Tensor | None) -> Any:
        """Replace ``torch.lstm_cell``, which is fused on CUDA regardless of ``torch.backends.cudnn.enabled``."""
        return _lstm_cell(input, hx, _cell_weights(weights, named))

    def gru_cell(self, input: Tensor, hx: Tensor, *weights: Tensor | None, **named: Tensor | None) -> Any:
        """Replace ``torch.gru_cell``, which is fused on CUDA regardless of ``torch.backends.cudnn.enabled``."""
        return _gru_cell(input, [hx], _cell_weights(weights, named))[0]

    def _layers(self, a: _Arguments) -> Any:
        dtype = _autocast_dtype(a.inputs)
        if torch.backends.cudnn.enabled and dtype in self._dtypes and a.inputs.numel():
            return self._cudnn(a, dtype)
        if a.batch_sizes is not None:
            raise JobError(
                f"cannot trace a packed {a.cell} in {dtype} without cuDNN, because its batch size varies "
                "between time steps: set torch.backends.cudnn.enabled = True or use precision fp32"
            )
        return _unrolled(a)

    def _cudnn(self, a: _Arguments, dtype: torch.dtype) -> Any:
        _require_steps(a)
        shape = a.shape(dtype)
        if a.train and a.dropout > 0:
            self._make_dropout_state(a.inputs)
        are_cast = dtype.itemsize == 2 and a.params[0].dtype == dtype and not isinstance(a.params[0], nn.Parameter)
        call = _Call(shape, a.train, a.batch_first, a.batch_sizes is not None, a.has_biases, are_cast)
        states = [state.to(dtype) for state in a.states]
        less_bytes, more_bytes = uncertainty_bytes(shape, a.train)
        self._note(
            f"cuDNN's buffers for a {a.cell} ({shape.num_layers} layers of {shape.hidden_size}, {shape.batch} samples "
            f"x {shape.num_steps} steps) are not published",
            less_bytes,
            more_bytes,
        )
        hidden = (states[0], states[1] if a.cell == "lstm" else None)
        output, hy, cy = _CudnnRnnFunction.apply(call, a.inputs.to(dtype), *hidden, *a.params)  # type: ignore[no-untyped-call]
        return (output, hy) if cy is None else (output, hy, cy)

    def _make_dropout_state(self, like: Tensor) -> None:
        """Allocate the dropout state of the device once, and keep it."""
        if self._dropout_state is None:
            self._dropout_state = like.new_empty(DROPOUT_STATE_BYTES, dtype=torch.uint8)
            less_bytes = DROPOUT_STATE_BYTES - _DROPOUT_STATE_LOW_BYTES
            more_bytes = _DROPOUT_STATE_HIGH_BYTES - DROPOUT_STATE_BYTES
            self._note("cuDNN's dropout state", less_bytes, more_bytes)


def _require_steps(a: _Arguments) -> None:
    """Raise an error if a call has too many steps, as cuDNN does. Techniques that split sequences avoid it."""
    if a.num_steps > MOST_STEPS:
        raise InputError(
            f"a recurrent layer ({a.cell}) cannot read on CUDA a sequence of {a.num_steps:,} steps: cuDNN takes at "
            f"most {MOST_STEPS:,} in one call and fails with CUDNN_STATUS_NOT_SUPPORTED: cut it into segments (the "
            f"technique time_segments with `steps` of at most {MOST_STEPS}, such as --pin time_segments=1024), use "
            "shorter sequences, or train on the CPU"
        )


def _autocast_dtype(inputs: Tensor) -> torch.dtype:
    """Return the autocast dtype in force, set for "cuda" or "cpu": CUDA training is traced on CPU tensors."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
    return inputs.dtype


def _unrolled(a: _Arguments) -> Any:
    """Run a recurrent layer as CUDA does without cuDNN: a cell per step, with stacked outputs."""
    x = a.inputs.transpose(0, 1) if a.batch_first else a.inputs
    weights, num_directions, finals = a.weights_by_layer(), 2 if a.bidirectional else 1, []
    for layer in range(a.num_layers):
        outputs = []
        for direction in range(num_directions):
            i = layer * num_directions + direction
            output, state = _one_direction(a.cell, x, [s[i] for s in a.states], weights[i], direction == 1)
            outputs.append(output)
            finals.append(state)
        x = torch.cat(outputs, -1) if a.bidirectional else outputs[0]
        if a.dropout and a.train and layer < a.num_layers - 1:
            x = torch.native_dropout(x, a.dropout, True)[0]
    stacked = [torch.stack(states) for states in zip(*finals, strict=True)]
    return (x.transpose(0, 1) if a.batch_first else x, *stacked)


def _one_direction(
    cell: Cell, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor | None], backwards: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    steps = list(x.unbind(0))
    outputs = []
    for step in reversed(steps) if backwards else steps:
        state = _CELLS[cell](step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state
