"""The workspace of an LSTM layer, by hand and as oneDNN allocates it, and the results of its backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.memory.lowering.cpu_kernels import corrected
from plimsoll.memory.lowering.mkldnn_rnn import unwritten_workspace, workspace_bytes, written_in_backward_bytes
from processor import skip_without_half_lstm

SHAPES = [
    (1, 1, 16, 16), (24, 4, 32, 32), (24, 4, 128, 32), (24, 4, 32, 64), (7, 3, 20, 25), (10, 2, 256, 256),
    (10, 2, 1000, 64), (5, 130, 48, 1024),
]  # fmt: skip


class Layers(TorchDispatchMode):
    """A mode that records the result sizes of oneDNN's recurrent ops, and the number of their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[list[int]] = []
        self.num_storages: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = corrected(lambda op, args, kwargs: op(*args, **kwargs))(func, args, kwargs or {})
        if "mkldnn_rnn_layer" in str(func):
            storages = [part.untyped_storage() for part in result if isinstance(part, Tensor)]
            self.sizes.append([storage.nbytes() for storage in storages])
            self.num_storages.append(len({storage._cdata for storage in storages}))
        return result


class RealLayers(Layers):
    """The same mode without corrections."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mkldnn_rnn_layer" in str(func):
            storages = [part.untyped_storage() for part in result if isinstance(part, Tensor)]
            self.sizes.append([storage.nbytes() for storage in storages])
            self.num_storages.append(len({storage._cdata for storage in storages}))
        return result


def test_the_workspace_by_hand():
    """Two float32 steps of one sample, 16 wide: gates 512, hidden 128, states five times 384 bytes, each in a page."""
    assert workspace_bytes(2, 1, 16, 16, 4) == 7 * 4096


def test_rows_that_would_be_a_multiple_of_256_are_a_cache_line_longer():
    """4 gates of 64 are 256 elements, padded to 272. There are 1,024 steps of one sample in float32."""
    gates, hidden, states = 1024 * 272 * 4, 1024 * 64 * 4, 2 * 1025 * 64 * 4
    assert workspace_bytes(1024, 1, 64, 64, 4) == gates + hidden + 5 * (states + 4096 - states % 4096)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layer_and_direction_takes_what_onednn_takes(shape: tuple[int, ...], dtype: torch.dtype):
    if dtype is torch.bfloat16:
        skip_without_half_lstm()
    num_steps, batch_size, num_inputs, hidden_size = shape
    found = []
    for mode, notes in ((None, RealLayers()), (FakeTensorMode(), Layers())):
        with mode or torch.enable_grad():
            module = nn.LSTM(num_inputs, hidden_size, num_layers=2, bidirectional=True, dtype=dtype)
            data = torch.ones(num_steps, batch_size, num_inputs, dtype=dtype)
            with notes:
                module(data)[0].sum().backward()
        found.append((notes.sizes, notes.num_storages))
    assert len(found[0][0]) == 8  # two layers, two directions, forward and backward
    assert found[0] == found[1]


def test_without_gradients_nothing_is_kept():
    with FakeTensorMode(), torch.no_grad(), Layers() as notes:
        nn.LSTM(8, 8)(torch.ones(3, 2, 8))
    assert max(size for sizes in notes.sizes for size in sizes) <= 3 * 2 * 8 * 4


def layer_arguments(*, is_reverse: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return arguments for 1,024 steps of one sample, 64 wide. Only the shapes and the direction matter."""
    weights = torch.empty(256, 64), torch.empty(256, 64)
    return (torch.empty(1024, 1, 64, dtype=dtype), *weights, *[None] * 4, is_reverse)


def test_what_is_written_of_a_workspace_by_hand():
    """Gates (1,024 x 272) and half the cells (2 x 1,025 x 64) are written, and all states if reversed."""
    gates, cells, states = 1024 * 272 * 4, (2 * 1025 * 64 // 1024 + 1) * 4096, (2 * 1025 * 64 // 1024 + 1) * 4096
    whole = workspace_bytes(1024, 1, 64, 64, 4)
    for is_reverse, written in ((False, gates + cells // 2), (True, gates + cells // 2 + states)):
        workspace = torch.empty(whole, dtype=torch.uint8)
        found = unwritten_workspace(layer_arguments(is_reverse=is_reverse), (None, None, None, workspace))
        assert found == (workspace, whole - written)
    assert unwritten_workspace(layer_arguments(is_reverse=False), (None, None, None, None)) is None


def test_what_backward_writes_of_it_is_float32_in_any_precision():
    """Backward writes the gradients of layer states, and half of the gradients of step and cell states."""
    part = (2 * 1025 * 64 // 1024 + 1) * 4096
    for dtype in (torch.float32, torch.bfloat16):
        assert written_in_backward_bytes(layer_arguments(is_reverse=True, dtype=dtype)) == 2 * part
