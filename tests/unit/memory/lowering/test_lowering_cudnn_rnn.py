"""The recurrent layers of a trace: shapes as in the real module, and every byte that cuDNN would hold."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plimsoll.errors import InputError, JobError
from plimsoll.memory.known_values import KnownValues
from plimsoll.memory.lowering.cudnn_rnn import (
    DROPOUT_STATE_BYTES,
    MOST_STEPS,
    CudnnRnn,
    shape_of,
    weights_flattened,
)
from plimsoll.memory.lowering.cudnn_rnn_sizes import reserve_bytes, uncertainty_bytes, workspace_bytes
from plimsoll.memory.lowering.packing import PACKING

I, H, T, B = 6, 8, 5, 3  # noqa: E741
LENGTHS = torch.tensor([5, 3, 2])  # made before any trace, so its values are known
CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Recorder(TorchDispatchMode):
    """A mode that records the bytes of all live storages in order of birth, including known ones."""

    def __init__(self, known):
        super().__init__()
        self.known = known
        self.live: dict[int, int] = {}
        self.peak = 0
        self.sizes: list[int] = []

    def see(self, tensor):
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self.live or not num_bytes:
            return
        self.live[key] = num_bytes
        self.sizes.append(num_bytes)
        self.peak = max(self.peak, self.total)
        weakref.finalize(storage, self.live.pop, key, None)

    @property
    def total(self) -> int:
        return sum(self.live.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = self.known.run(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out


def replacements(rnn: CudnnRnn):
    """Return the replacements by torch function; ``torch.lstm`` and ``torch._VF.lstm`` are the same."""
    layers = {getattr(torch, name): getattr(rnn, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    return {**layers, torch.lstm_cell: rnn.lstm_cell, torch.gru_cell: rnn.gru_cell}


class Replaced(TorchFunctionMode):
    def __init__(self, rnn: CudnnRnn):
        super().__init__()
        self.replacements = {**replacements(rnn), torch._pack_padded_sequence: PACKING["_pack_padded_sequence"]}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.replacements.get(func, func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def traced(notes=None, **options):
    rnn = CudnnRnn(lambda *note: None if notes is None else notes.append(note), **options)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Replaced(rnn), Recorder(KnownValues(mode, lambda: None)) as recorder:
        yield recorder


def flatten_like_cudnn(model):
    """Join the weights of each recurrent layer, as ``.to("cuda")`` does, and return the number of changed layers."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    first = [layer._flat_weights[0].untyped_storage()._cdata for layer in layers]
    with weights_flattened(lambda tensor: False):
        for layer in layers:
            layer.flatten_parameters()
    return sum(layer._flat_weights[0].untyped_storage()._cdata != one for layer, one in zip(layers, first, strict=True))


def flat_weight_bytes(module):
    """Return the bytes of the flat weights. cuDNN allocates biases even for a layer without biases."""
    return shape_of(module, 1, 1).weight_elements * next(module.parameters()).element_size()


def module_of(cell, **options):
    return CELLS[cell](I, H, **options)


def seen(recorder, module):
    for parameter in module.parameters():
        recorder.see(parameter.data)


def layout(result):
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


GRID = [
    pytest.param(cell, layers, both, proj, first, packed, dropout, id=f"{cell}-{layers}-{both}-{proj}-{first}-{packed}")
    for cell in CELLS
    for layers, dropout in ((1, 0.0), (2, 0.0), (3, 0.5))
    for both in (False, True)
    for proj in ((0, 4) if cell == "lstm" else (0,))
    for first, packed in ((False, False), (True, False), (False, True))
]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("cell", "layers", "both", "proj", "first", "packed", "dropout"), GRID)
def test_outputs_and_gradients_have_the_layout_of_the_real_module(
    cell, layers, both, proj, first, packed, dropout, flat
):
    def run(flatten):
        module = (
            module_of(cell, num_layers=layers, bidirectional=both, proj_size=proj, batch_first=first, dropout=dropout)
            if cell == "lstm"
            else module_of(cell, num_layers=layers, bidirectional=both, batch_first=first, dropout=dropout)
        )
        if flatten:
            assert flatten_like_cudnn(module) == 1
        inputs = torch.randn(B, T, I, requires_grad=True) if first else torch.randn(T, B, I, requires_grad=True)
        given = pack_padded_sequence(inputs, LENGTHS) if packed else inputs
        result = module(given)
        output = result[0].data if packed else result[0]
        output.sum().backward()
        return layout(result), layout([inputs.grad, *[p.grad for p in module.parameters()]])

    real = run(False)
    with traced():
        assert run(flat) == real


def test_of_a_packed_batch_only_the_rows_that_are_there_are_counted():
    with traced() as recorder:
        module = module_of("gru")
        module(pack_padded_sequence(torch.randn(T, B, I), LENGTHS))
        packed = shape_of(module, T, B)._replace(packed_rows=sum(LENGTHS))
        assert reserve_bytes(packed).likely in recorder.sizes
        assert workspace_bytes(packed).likely in recorder.sizes
        assert reserve_bytes(packed).likely < reserve_bytes(shape_of(module, T, B)).likely


def kept_after_forward(module, inputs, **grad):
    """Return the bytes alive after forward, without weights, inputs and results, and the module."""
    with traced() as recorder:
        module, inputs = module(), inputs()
        flatten_like_cudnn(module)
        seen(recorder, module)
        recorder.see(inputs)
        before = recorder.total
        with contextlib.nullcontext() if grad.get("grad", True) else torch.no_grad():
            result = module(inputs)
        gc.collect()
        held = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tree_leaves(result)}
        return recorder.total - before - sum(held.values()), module


def test_forward_keeps_the_reserve_and_the_first_state():
    # LSTM, 2 layers: 5 gates and states of 8 for each of 2 layers, 1 output between them, for 5 steps of 3 samples;
    # the zeros that the module makes for h and c: one tensor each, [2, 3, 8]; and 256 bytes of cuDNN's own.
    kept, _ = kept_after_forward(lambda: module_of("lstm", num_layers=2), lambda: torch.randn(T, B, I))
    assert kept == 4 * T * B * H * (5 * 2 + 1) + 2 * 4 * (2 * B * H) + 256
    kept, _ = kept_after_forward(lambda: module_of("gru"), lambda: torch.randn(T, B, I))
    assert kept == 4 * T * B * H * 6 + 4 * (B * H) + 256
    kept, _ = kept_after_forward(
        lambda: module_of("rnn", bidirectional=True, nonlinearity="relu"), lambda: torch.randn(T, B, I)
    )
    assert kept == 2 * 4 * T * B * H + 4 * (2 * B * H) + 256


@pytest.mark.parametrize(("train", "grad"), [(False, False), (True, False)])
def test_nothing_is_kept_without_gradients(train, grad):
    kept, _ = kept_after_forward(
        lambda: module_of("lstm", num_layers=2).train(train), lambda: torch.randn(T, B, I), grad=grad
    )
    assert kept == 0


def test_evaluation_takes_no_reserve_at_all():
    with traced() as recorder, torch.no_grad():
        module = module_of("lstm").eval()
        module(torch.randn(T, B, I))
        assert reserve_bytes(shape_of(module, T, B)).likely not in recorder.sizes
        assert workspace_bytes(shape_of(module, T, B)).likely in recorder.sizes


def test_gradients_after_evaluation_fail_as_on_cuda():
    with traced():
        output, _ = module_of("lstm").eval()(torch.randn(T, B, I))
        with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
            output.sum().backward()


@pytest.mark.parametrize("first", [False, True])
def test_only_gradients_remain_after_backward(first):
    with traced() as recorder:
        module = module_of("lstm", num_layers=2, batch_first=first)
        flatten_like_cudnn(module)
        seen(recorder, module)
        inputs = torch.randn(B, T, I, requires_grad=True)
        recorder.see(inputs)
        before = recorder.total
        module(inputs)[0].sum().backward()
        gc.collect()
        # One buffer for the gradients of all weights, and the gradient of the input.
        assert recorder.total - before == flat_weight_bytes(module) + 4 * T * B * I
        assert len({p.grad.untyped_storage()._cdata for p in module.parameters()}) == 1


def test_backward_takes_what_cudnn_takes_at_its_peak():
    with traced() as recorder:
        module = module_of("gru", batch_first=True)
        flatten_like_cudnn(module)
        inputs = torch.randn(B, T, I, requires_grad=True)
        output, _ = module(inputs)
        grad = torch.ones(B, T, H)
        recorder.sizes.clear()
        output.backward(grad)
        x, y, h = 4 * T * B * I, 4 * T * B * H, 4 * B * H
        workspace = workspace_bytes(shape_of(module, T, B)).likely
        # x and dy with time first, dx, zeros for the state's gradient, dhx, workspace; x again, dw, workspace. Autograd
        # copies dx into the order of the input.
        expected = [h, x, y, x, h, workspace, x, flat_weight_bytes(module), workspace, x]
        assert recorder.sizes == expected


def test_weights_apart_are_copied_at_every_call_and_kept():
    def forward(flatten):
        with traced() as recorder:
            module = module_of("lstm")
            if flatten:
                flatten_like_cudnn(module)
            seen(recorder, module)
            before = recorder.total
            result = module(torch.randn(T, B, I))
            assert len(result) == 2
            return recorder.total - before, module

    (apart, module), (flat, _) = forward(False), forward(True)
    assert apart - flat == flat_weight_bytes(module) == 4 * (4 * H * (I + H) + 2 * 4 * H)


def test_flattening_leaves_one_storage_of_all_weights():
    with traced() as recorder:
        model = nn.ModuleDict({"a": module_of("lstm", num_layers=2, bidirectional=True), "b": nn.Linear(2, 2)})
        assert flatten_like_cudnn(model) == 1
        assert flatten_like_cudnn(model) == 0  # they share it already
        assert len({p.untyped_storage()._cdata for p in model["a"].parameters()}) == 1
        assert sum(p.numel() for p in model["a"].parameters()) * 4 == flat_weight_bytes(model["a"])
        assert model["a"]._flat_weights[0] is model["a"].weight_ih_l0
        gc.collect()
        assert flat_weight_bytes(model["a"]) in recorder.live.values()
        assert flatten_like_cudnn(module_of("gru", dtype=torch.bfloat16)) == 0


def test_a_layer_without_biases_has_them_in_the_buffer_and_gradients_apart():
    with traced() as recorder:
        module = module_of("lstm", bias=False)
        flatten_like_cudnn(module)
        assert flat_weight_bytes(module) == 4 * (4 * H * (I + H) + 2 * 4 * H)
        module(torch.randn(T, B, I))[0].sum().backward()
        assert len({p.grad.untyped_storage()._cdata for p in module.parameters()}) == 2
        assert recorder.total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_keep_their_own_size(dtype):
    with traced():
        module = module_of("gru", dtype=dtype)
        output, _ = module(torch.randn(T, B, I, dtype=dtype))
        assert output.dtype == dtype
        output.sum().backward()
        assert module.weight_hh_l0.grad.dtype == dtype


def test_autocast_casts_the_weights_into_a_half_buffer_and_gives_float32_gradients():
    with traced() as recorder:
        module = module_of("lstm")
        flatten_like_cudnn(module)
        with torch.autocast("cpu", torch.float16):
            recorder.sizes.clear()
            output, _ = module(torch.randn(T, B, I))
        assert output.dtype == torch.float16
        assert flat_weight_bytes(module) // 2 in recorder.sizes
        output.sum().backward()
        assert module.weight_hh_l0.grad.dtype == torch.float32


def test_weights_that_autocast_has_cast_have_no_buffer_beside_them():
    """`_cudnn_rnn_cast_reflatten` casts into the buffer itself, so a second buffer would count all weights twice."""
    with traced() as recorder:
        module = module_of("lstm", num_layers=2)
        cast = [weight.half() for weight in module._flat_weights]
        inputs, states = torch.randn(T, B, I).half(), [torch.zeros(2, B, H).half()] * 2
        recorder.sizes.clear()
        torch._VF.lstm(inputs, states, cast, True, 2, 0.0, True, False, False)
        assert flat_weight_bytes(module) // 2 not in recorder.sizes


def test_a_gradient_of_zeros_for_the_output_lives_until_the_weights_have_theirs():
    """Only the last state of the GRU is used: `_cudnn_rnn_backward` creates these zeros and holds them."""
    with traced() as recorder:
        module = module_of("gru")
        flatten_like_cudnn(module)
        last = module(torch.randn(T, B, I))[1].sum()
        seen(recorder, module)
        before = recorder.peak = recorder.total
        last.backward()
        workspace = workspace_bytes(shape_of(module, T, B)).likely
        assert recorder.peak - before >= 4 * T * B * H + flat_weight_bytes(module) + workspace


def test_the_dropout_state_is_made_once():
    notes = []
    with traced(notes) as recorder:
        module = module_of("lstm", num_layers=2, dropout=0.5)
        for _ in range(2):
            module(torch.randn(T, B, I))
        assert recorder.sizes.count(DROPOUT_STATE_BYTES) == 1
    assert [text for text, _, _ in notes].count("cuDNN's dropout state") == 1


def test_each_forward_says_how_far_off_it_may_be():
    notes = []
    with traced(notes):
        module = module_of("lstm")
        module(torch.randn(T, B, I))
        module.eval()(torch.randn(T, B, I))
    assert "lstm (1 layers of 8, 3 samples x 5 steps)" in notes[0][0]
    assert notes[0][1:] == uncertainty_bytes(shape_of(module, T, B))
    assert notes[1][1:] == uncertainty_bytes(shape_of(module, T, B), train=False)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_without_cudnn_the_steps_are_unrolled(cell, first):
    def run():
        module = module_of(cell, num_layers=2, bidirectional=True, batch_first=first, dropout=0.5)
        inputs = torch.randn(*((B, T) if first else (T, B)), I, requires_grad=True)
        result = module(inputs)
        result[0].sum().backward()
        return layout(result), layout([inputs.grad, *[p.grad for p in module.parameters()]])

    real = run()
    with torch.backends.cudnn.flags(enabled=False), traced() as recorder:
        assert run() == real
        # A fused cell keeps 4 (LSTM) or 5 (GRU) values of H per sample and step.
        per_step = {"lstm": 4, "gru": 5, "rnn": 1}[cell] * B * H * 4
        assert recorder.sizes.count(per_step) >= 2 * 2 * T


def test_bfloat16_without_hardware_for_it_is_unrolled():
    with traced(has_bfloat16=False) as recorder:
        module_of("gru", dtype=torch.bfloat16)(torch.randn(T, B, I, dtype=torch.bfloat16))
        assert recorder.sizes.count(5 * B * H * 2) == T + 1  # one for each step, and the 5 stacked steps of [3, 8]


def test_a_packed_batch_without_cudnn_is_refused_with_a_remedy():
    with torch.backends.cudnn.flags(enabled=False), traced(), pytest.raises(JobError, match="enabled = True"):
        module_of("gru")(pack_padded_sequence(torch.randn(T, B, I), LENGTHS))


@pytest.mark.parametrize("bias", [True, False])
def test_single_cells_keep_their_fused_workspace(bias):
    def run(cell):
        module = cell(I, H, bias=bias)
        inputs = torch.randn(B, I, requires_grad=True)
        result = module(inputs)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        return layout(result), layout([inputs.grad, *[p.grad for p in module.parameters()]])

    for cell, per_sample in ((nn.LSTMCell, 4), (nn.GRUCell, 5)):
        real = run(cell)
        with traced() as recorder:
            assert run(cell) == real
            assert per_sample * B * H * 4 in recorder.sizes


def test_the_keys_are_what_a_function_mode_receives():
    received = set()

    class Listen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            received.add(func)
            return func(*args, **(kwargs or {}))

    with Listen():
        for module in (nn.LSTM(I, H), nn.GRU(I, H), nn.RNN(I, H), nn.RNN(I, H, nonlinearity="relu")):
            module(torch.randn(T, B, I))
        for module in (nn.LSTMCell(I, H), nn.GRUCell(I, H)):
            module(torch.randn(B, I))
    assert set(replacements(CudnnRnn(lambda *_: None))) <= received


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_that_is_longer_than_cudnn_takes_is_refused_and_one_that_is_not_passes(cell, first):
    def run(num_steps):
        module_of(cell, batch_first=first)(torch.empty(*((1, num_steps) if first else (num_steps, 1)), I))

    with traced():
        run(MOST_STEPS)
        with pytest.raises(InputError, match=r"65,536 steps: .* 65,535 .*time_segments with `steps` of at most 65535"):
            run(MOST_STEPS + 1)


def test_a_packed_sequence_counts_its_longest_sample():
    lengths = torch.tensor([MOST_STEPS + 1, 1])
    with traced(), pytest.raises(InputError, match=r"\(gru\) cannot read on CUDA a sequence of 65,536 steps"):
        module_of("gru")(pack_padded_sequence(torch.empty(MOST_STEPS + 1, 2, I), lengths))


def test_a_long_sequence_in_segments_passes():
    """`time_segments` runs it like this, passing the state from one segment to the next."""
    with traced():
        module, state = module_of("lstm"), None
        for segment in torch.empty(MOST_STEPS + 1, 1, I).split(MOST_STEPS):
            output, state = module(segment, state)
        assert output.shape == (1, 1, H)
