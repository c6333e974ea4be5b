"""Ops on fake tensors return as many bytes as the CPU kernels, for every op whose fake version differs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from plimsoll.memory.lowering.cpu_kernels import corrected

aten = torch.ops.aten
INDICES, OFFSETS, ENDS = torch.zeros(7, dtype=torch.int64), torch.tensor([0, 3]), torch.tensor([0, 3, 7])


def norms(dtype: torch.dtype) -> Iterator[tuple[str, Any, tuple]]:
    rows, image = torch.ones(4, 6, 32, dtype=dtype), torch.ones(4, 8, 10, dtype=dtype)
    for parameters in (torch.float32, dtype):
        weight, bias = torch.ones(32, dtype=parameters), torch.zeros(32, dtype=parameters)
        short, short_bias = weight[:8].clone(), bias[:8].clone()
        running = torch.zeros(8, dtype=parameters), torch.ones(8, dtype=parameters)
        name = f"of {parameters}"
        yield f"layer norm {name}", aten.native_layer_norm.default, (rows, [32], weight, bias, 1e-5)
        yield f"layer norm without bias {name}", aten.native_layer_norm.default, (rows, [32], weight, None, 1e-5)
        yield f"group norm {name}", aten.native_group_norm.default, (image, short, short_bias, 4, 8, 10, 2, 1e-5)
        for op in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
            yield f"{op} {name}", op, (image, short, short_bias, *running, True, 0.1, 1e-5)
            yield f"{op} evaluated {name}", op, (image, short, short_bias, *running, False, 0.1, 1e-5)
        op = aten._native_batch_norm_legit.no_stats
        yield f"{op} {name}", op, (image, short, short_bias, True, 0.1, 1e-5)
        statistics = torch.zeros(4, 2, dtype=parameters), torch.ones(4, 2, dtype=parameters)
        arguments = (image, image, *statistics, short, 4, 8, 10, 2, [True] * 3)
        yield f"group norm backward {name}", aten.native_group_norm_backward.default, arguments
    yield "layer norm without weights", aten.native_layer_norm.default, (rows, [32], None, None, 1e-5)
    yield "weight norm", aten._weight_norm_interface.default, (rows[0], torch.ones(6, 1, dtype=dtype), 0)


def losses(dtype: torch.dtype) -> Iterator[tuple[str, Any, tuple]]:
    shares = torch.full((4, 6), 0.5, dtype=dtype)
    for reduction in (0, 1, 2):
        yield f"mse {reduction}", aten.mse_loss.default, (shares, shares, reduction)
        yield f"mse of a row {reduction}", aten.mse_loss.default, (shares, shares[0], reduction)
        yield f"smooth l1 {reduction}", aten.smooth_l1_loss.default, (shares, shares, reduction)
        yield f"huber {reduction}", aten.huber_loss.default, (shares, shares, reduction)
        yield f"cross entropy {reduction}", aten.binary_cross_entropy.default, (shares, shares, None, reduction)
        yield f"soft margin {reduction}", aten.soft_margin_loss.default, (shares, shares, reduction)
    yield "mse by default", aten.mse_loss.default, (shares, shares)


def bags(dtype: torch.dtype) -> Iterator[tuple[str, Any, tuple]]:
    table, op = torch.ones(11, 4, dtype=dtype), aten._embedding_bag.default
    yield "bags by default", op, (table, INDICES, OFFSETS)
    for mode in (0, 1, 2):
        yield f"bags {mode}", op, (table, INDICES, OFFSETS, False, mode)
        yield f"bags with ends {mode}", op, (table, INDICES, ENDS, False, mode, False, None, True)
        yield f"bags with padding {mode}", op, (table, INDICES, OFFSETS, False, mode, False, None, False, 0)


CASES = [
    pytest.param(op, arguments, id=f"{name} {str(dtype).removeprefix('torch.')}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for cases in (norms, losses, bags)
    for name, op, arguments in cases(dtype)
]


def sizes(results: Any) -> list[tuple]:
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    return [(tuple(tensor.shape), tensor.untyped_storage().nbytes()) for tensor in tensors]


@pytest.mark.parametrize(("op", "arguments"), CASES)
def test_a_fake_op_gives_the_bytes_of_the_real_one(op: Any, arguments: tuple):
    expected = sizes(op(*arguments))
    mode = FakeTensorMode()
    fakes = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, arguments)
    with mode:
        found = corrected(lambda op, args, kwargs: op(*args, **kwargs))(op, fakes, {})
    assert sizes(found) == expected
