"""Memory of single kernels in addition to their results, over grids of shapes; only a GPU can tell.

Each probe is a function from a `Meter` to rows; a shape that fails is a row with its error. On the CPU a few shapes run
and every number is None. Needs only torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.gpu.meter import FAILURES, Meter, bytes_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Row = dict[str, Any]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(meter: Meter, grid: Iterator[Any]) -> Iterator[Any]:
    """Yield the whole grid, or its first few rows if nothing is measured."""
    return grid if meter.is_cuda else itertools.islice(grid, 3)


def _row(fields: Row, work: Callable[[], Row]) -> Row:
    try:
        return fields | work()
    except FAILURES as error:
        return fields | {"error": f"{type(error).__name__}: {error}"[:200]}


# -- recurrent nets ----------------------------------------------------------------------------------------------------


def cudnn_rnn(meter: Meter) -> Iterator[Row]:
    """Measure the reserve and the workspaces of cuDNN's recurrent nets."""
    grid = itertools.product(
        ("lstm", "gru"), (1, 2, 3), (0.0, 0.2), (FP32, FP16), (128, 512, 1024), (32, 128), (16, 64), (False, True)
    )
    for cell, layers, dropout, dtype, hidden, length, batch, bidirectional in _some(meter, grid):
        if layers == 1 and dropout:
            continue
        fields = {
            "cell": cell, "layers": layers, "dropout": dropout, "dtype": _name(dtype), "hidden": hidden,
            "length": length, "batch": batch, "bidirectional": bidirectional,
        }  # fmt: skip
        yield _row(fields, lambda fields=fields, dtype=dtype: _one_rnn(meter, fields, dtype))


def _one_rnn(meter: Meter, fields: Row, dtype: torch.dtype) -> Row:
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}[fields["cell"]]
    hidden = fields["hidden"] if meter.is_cuda else 8
    module = kind(
        hidden, hidden, fields["layers"], dropout=fields["dropout"], bidirectional=fields["bidirectional"],
        device=meter.device, dtype=dtype,
    )  # fmt: skip
    given = torch.zeros(fields["length"], fields["batch"], hidden, device=meter.device, dtype=dtype).requires_grad_()
    module(given)  # creates the dropout state, which stays

    (output, last), forward = meter.measure(lambda: module(given))
    states = last if isinstance(last, tuple) else (last,)
    reserve = getattr(output.grad_fn, "_saved_result3", None)
    with torch.no_grad():
        _, without_grad = meter.measure(lambda: module(given))
    _, backward = meter.measure(lambda: output.backward(torch.ones_like(output)))
    return {
        "reserve_bytes": None if reserve is None else bytes_of([reserve]),
        "outputs_bytes": bytes_of([output, *states]),
        "weights_bytes": bytes_of([module._flat_weights[0]]),
        "forward": forward,
        "without_grad": without_grad,
        "backward": backward,
    }


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(meter: Meter) -> Iterator[Row]:
    """Measure the saved and temporary memory of each kernel of `scaled_dot_product_attention`."""
    shapes = ((8, 12, 256, 64), (2, 16, 1000, 64), (4, 16, 512, 128), (2, 8, 300, 80), (1, 4, 2048, 256))
    grid = itertools.product(_BACKENDS, (FP32, BF16, FP16), shapes, ("none", "causal", "bias"), (0.0, 0.1))
    for backend, dtype, shape, mask, dropout in _some(meter, grid):
        if backend == "flash" and (dtype is FP32 or mask == "bias"):
            continue
        fields = {"backend": backend, "dtype": _name(dtype), "shape": shape, "mask": mask, "dropout": dropout}
        yield _row(fields, lambda fields=fields, dtype=dtype: _one_attention(meter, fields, dtype))


def _one_attention(meter: Meter, fields: Row, dtype: torch.dtype) -> Row:
    query, key, value, mask = _attention_inputs(meter, fields, dtype)

    def attend() -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=fields["dropout"], is_causal=fields["mask"] == "causal"
        )

    with sdpa_kernel(_BACKENDS[fields["backend"]]):
        output, forward = meter.measure(attend)
        given = torch.ones_like(output)
        _, backward = meter.measure(lambda: output.backward(given))
    return {"output_bytes": bytes_of([output]), "forward": forward, "backward": backward}


def _attention_inputs(meter: Meter, fields: Row, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    batch, heads, length, width = fields["shape"] if meter.is_cuda else (1, 2, 8, 8)

    def tokens() -> Tensor:  # as in a model's projection
        return torch.zeros(batch, length, heads, width, device=meter.device, dtype=dtype).transpose(1, 2)

    bias = torch.zeros(batch, 1, length, length, device=meter.device, dtype=dtype) if fields["mask"] == "bias" else None
    return tokens().requires_grad_(), tokens().requires_grad_(), tokens().requires_grad_(), bias


def attention_choice(meter: Meter) -> Iterator[Row]:
    """Record the kernel that torch chooses; the numbers are `torch.nn.attention.SDPBackend` values."""
    shapes = ((8, 12, 256, 64), (8, 12, 100, 64), (2, 8, 300, 80), (1, 4, 2048, 256), (8, 12, 1, 64))
    grid = itertools.product((FP32, BF16, FP16), shapes, ("none", "causal", "bias"), (0.0, 0.1), (True, False))
    for dtype, shape, mask, dropout, trains in _some(meter, grid):
        fields = {"dtype": _name(dtype), "shape": shape, "mask": mask, "dropout": dropout, "trains": trains}

        def choose(fields: Row = fields, dtype: torch.dtype = dtype) -> Row:
            query, key, value, bias = _attention_inputs(meter, fields, dtype)
            with torch.set_grad_enabled(fields["trains"]):
                chosen = torch._fused_sdp_choice(query, key, value, bias, fields["dropout"], fields["mask"] == "causal")
            return {"chosen": int(chosen)}

        yield _row(fields, choose)


# -- other kernels -----------------------------------------------------------------------------------------------------


def kernels(meter: Meter) -> Iterator[Row]:
    """Measure kernels with scratch memory; ``result_bytes`` is the size of the result."""
    for name, make in _KERNELS.items():
        for size in _some(meter, iter((2048, 8192, 20000))):
            for dtype in (FP32, BF16):
                fields = {"kernel": name, "rows": size, "dtype": _name(dtype)}

                def run(make: Any = make, size: int = size, dtype: torch.dtype = dtype) -> Row:
                    work = make(size if meter.is_cuda else 16, dtype, meter.device)
                    work()  # one-time allocations
                    result, numbers = meter.measure(work)
                    tensors = [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]
                    return {"result_bytes": bytes_of(tensors), **numbers}

                yield _row(fields, run)


def _embedding_backward(rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    grad = torch.zeros(rows, 768, device=device, dtype=dtype)
    ids = torch.arange(rows, device=device) % 997
    return lambda: torch.ops.aten.embedding_dense_backward(grad, ids, 30000, -1, False)


def _layer_norm_backward(rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    given, weight = torch.zeros(rows, 768, device=device, dtype=dtype), torch.ones(768, device=device, dtype=dtype)
    out, mean, rstd = torch.ops.aten.native_layer_norm(given, [768], weight, weight, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    return lambda: backward(out, given, [768], mean, rstd, weight, weight, [True, True, True])


def _of_matrix(work: Callable[[Tensor], Any]) -> Callable[..., Callable[[], Any]]:
    def make(rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
        given = torch.zeros(rows, 768, device=device, dtype=dtype)
        return lambda: work(given)

    return make


_KERNELS: dict[str, Callable[..., Callable[[], Any]]] = {
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_dropout": _of_matrix(lambda x: torch.native_dropout(x, 0.1, True)),
    "sum of rows": _of_matrix(lambda x: x.sum(0)),
    "sum of all": _of_matrix(lambda x: x.sum()),
    "norm": _of_matrix(torch.linalg.vector_norm),
    "foreach norm": _of_matrix(lambda x: tuple(torch._foreach_norm([x, x, x]))),
    "log_softmax": _of_matrix(lambda x: x.log_softmax(-1)),
    "logsumexp": _of_matrix(lambda x: x.logsumexp(-1)),
    "cumsum": _of_matrix(lambda x: x.cumsum(0)),
    "argmax": _of_matrix(lambda x: x.argmax(-1)),
    "topk": _of_matrix(lambda x: tuple(x.topk(50))),
    "sort": _of_matrix(lambda x: tuple(x.sort())),
    "nonzero": _of_matrix(lambda x: (x == 0).nonzero()),
    "masked_select": _of_matrix(lambda x: x.masked_select(x == 0)),
    "index_put accumulate": _of_matrix(
        lambda x: x.index_put((torch.arange(len(x), device=x.device) // 2,), x, accumulate=True)
    ),
    "isfinite all": _of_matrix(lambda x: x.isfinite().all()),
}


def matmul_workspaces(meter: Meter) -> Iterator[Row]:
    """Measure memory kept by the first products of a process's threads: the workspaces of cuBLAS and cuBLASLt."""
    width = 512 if meter.is_cuda else 8
    for dtype in (FP32, BF16, FP16):
        meter.clean()
        square = torch.zeros(width, width, device=meter.device, dtype=dtype).requires_grad_()
        bias = torch.zeros(width, device=meter.device, dtype=dtype)
        for name, work in (
            ("mm", lambda square=square: square.detach() @ square.detach()),
            ("mm again", lambda square=square: square.detach() @ square.detach()),
            ("bmm", lambda square=square: square.detach()[None] @ square.detach()[None]),
            ("addmm", lambda square=square, bias=bias: torch.addmm(bias, square.detach(), square.detach())),
            ("linear", lambda square=square, bias=bias: nn.functional.linear(square.detach(), square.detach(), bias)),
        ):
            yield _row({"moment": name, "dtype": _name(dtype)}, lambda work=work: _product(meter, work))
        loss = nn.functional.linear(square, square, bias).sum()
        for name in ("backward", "backward again"):
            yield _row({"moment": name, "dtype": _name(dtype)}, lambda loss=loss: _backward(meter, loss))


def _product(meter: Meter, work: Callable[[], Tensor]) -> Row:
    result, numbers = meter.measure(work)
    return {"result_bytes": bytes_of([result]), **numbers}


def _backward(meter: Meter, loss: Tensor) -> Row:
    _, numbers = meter.measure(lambda: loss.backward(retain_graph=True))
    return numbers


def context_growth(meter: Meter) -> Iterator[Row]:
    """Measure the driver's memory for this process outside the allocator, after more and more kinds of kernels."""
    width = 256 if meter.is_cuda else 8
    square = torch.zeros(width, width, device=meter.device)
    half = square.to(BF16)

    def convolve() -> None:
        nn.functional.conv1d(square[None], square[:, :, None])

    moments: dict[str, Callable[[], object]] = {
        "a tensor": lambda: square,
        "elementwise": lambda: torch.tanh(square * 2 + 1),
        "sum": square.sum,
        "fp32 product": lambda: square @ square,
        "bf16 product": lambda: half @ half,
        "random numbers": lambda: torch.rand_like(square),
        "sort": square.sort,
        "attention": lambda: nn.functional.scaled_dot_product_attention(half[None], half[None], half[None]),
        "convolution": convolve,
        "lstm": lambda: nn.LSTM(width, width, device=meter.device)(square[None]),
        "foreach": lambda: torch._foreach_add([square, square], 1.0),
    }
    for name, work in moments.items():

        def run(work: Callable[[], object] = work) -> Row:
            work()
            if meter.is_cuda:
                torch.cuda.synchronize(meter.device)
            return {
                "outside_bytes": meter.outside_bytes(), "nvml_used_bytes": meter.nvml_used_bytes(),
                "nvml_process_bytes": meter.nvml_process_bytes(),
            }  # fmt: skip

        yield _row({"after": name}, run)


PROBES: dict[str, Callable[[Meter], Iterator[Row]]] = {
    "matmul_workspaces": matmul_workspaces,
    "attention_choice": attention_choice,
    "attention": attention,
    "cudnn_rnn": cudnn_rnn,
    "kernels": kernels,
}
"""Probes that run in the process of the cases; `context_growth` needs a separate process."""
