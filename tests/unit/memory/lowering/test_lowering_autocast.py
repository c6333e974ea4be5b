"""CUDA's autocast on CPU tensors: all ops of its lists, the copies that it keeps, and complete restoration."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.errors import DeviceError
from plimsoll.memory.lowering.autocast import cast_to_lower_precision, cuda_autocast_lists, cuda_policies

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Make = Callable[..., torch.Tensor]
LABEL = torch.tensor([1, 0])
ONES = [1, 1]

# Arguments of every op of the lists, by its name; `t` makes a tensor of the dtype under test.
ARGUMENTS: dict[str, Callable[[Make], tuple]] = {
    **dict.fromkeys(
        ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
         "sinh", "tan", "softplus", "prod", "sum", "pdist", "linalg_vector_norm", "nuclear_norm", "norm.Scalar"],
        lambda t: (t(2, 3),),
    ),
    **dict.fromkeys(
        ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "hinge_embedding_loss", "dist", "atan2",
         "cdist", "binary_cross_entropy_with_logits", "cosine_similarity", "pow.Tensor_Tensor", "linalg_vecdot"],
        lambda t: (t(2, 3), t(2, 3)),
    ),
    "soft_margin_loss": lambda t: (t(2, 3), t(2, 3).detach()),
    "_convolution.deprecated": lambda t: (
        *(t(1, 2, 5), t(3, 2, 3), t(3), [1], [0], [1]), *(False, [0], 1, False, False, True),
    ),
    "_convolution": lambda t: (
        *(t(1, 2, 5), t(3, 2, 3), t(3), [1], [0], [1]), *(False, [0], 1, False, False, True, True),
    ),
    "convolution": lambda t: (t(1, 2, 5), t(3, 2, 3), t(3), [1], [0], [1], False, [0], 1),
    "conv1d": lambda t: (t(1, 2, 5), t(3, 2, 3), t(3)),
    "conv2d": lambda t: (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3)),
    "conv3d": lambda t: (t(1, 2, 4, 4, 4), t(3, 2, 2, 2, 2), t(3)),
    "conv_tbc": lambda t: (t(5, 1, 2), t(3, 2, 4), t(4)),
    "conv_transpose1d": lambda t: (t(1, 2, 5), t(2, 3, 3)),
    "conv_transpose2d.input": lambda t: (t(1, 2, 4, 4), t(2, 3, 2, 2)),
    "conv_transpose3d.input": lambda t: (t(1, 2, 3, 3, 3), t(2, 3, 2, 2, 2)),
    "prelu": lambda t: (t(2, 3), t(3)),
    "addmm": lambda t: (t(3), t(2, 4), t(4, 3)),
    "addmv": lambda t: (t(2), t(2, 4), t(4)),
    "addr": lambda t: (t(2, 3), t(2), t(3)),
    "matmul": lambda t: (t(2, 3), t(3, 2)),
    "einsum": lambda t: ("ij,jk", [t(2, 3), t(3, 2)]),
    "mm": lambda t: (t(2, 3), t(3, 2)),
    "mv": lambda t: (t(2, 3), t(3)),
    "linear": lambda t: (t(2, 3), t(4, 3), t(4)),
    "addbmm": lambda t: (t(2, 3), t(4, 2, 5), t(4, 5, 3)),
    "baddbmm": lambda t: (t(4, 2, 3), t(4, 2, 5), t(4, 5, 3)),
    "bmm": lambda t: (t(4, 2, 5), t(4, 5, 3)),
    "chain_matmul": lambda t: ([t(2, 3), t(3, 2), t(2, 2)],),
    "linalg_multi_dot": lambda t: ([t(2, 3), t(3, 2), t(2, 2)],),
    "lstm_cell": lambda t: (t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16)),
    "gru_cell": lambda t: (t(2, 3), t(2, 4), t(12, 3), t(12, 4), t(12), t(12)),
    "rnn_tanh_cell": lambda t: (t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "rnn_relu_cell": lambda t: (t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "scaled_dot_product_attention": lambda t: (t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4)),
    "pow.Tensor_Scalar": lambda t: (t(2, 3), 2.0),
    "pow.Scalar": lambda t: (2.0, t(2, 3)),
    "layer_norm": lambda t: (t(2, 3), [3], t(3), t(3)),
    "native_layer_norm": lambda t: (t(2, 3), [3], t(3), t(3), 1e-5),
    "rms_norm": lambda t: (t(2, 3), [3], t(3)),
    "group_norm": lambda t: (t(2, 4, 3), 2, t(4), t(4)),
    "frobenius_norm.dim": lambda t: (t(2, 3), [0, 1]),
    "nuclear_norm.dim": lambda t: (t(2, 3), [0, 1]),
    "poisson_nll_loss": lambda t: (t(2, 3), t(2, 3), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda t: (t(2, 3), t(2, 3), t(2)),
    "nll_loss": lambda t: (t(2, 3), LABEL),
    "nll_loss2d": lambda t: (t(2, 3, 1, 1), LABEL[:, None, None]),
    "margin_ranking_loss": lambda t: (t(2), t(2), t(2)),
    "multilabel_margin_loss": lambda t: (t(2, 2), torch.tensor([[0, -1], [1, -1]])),
    "triplet_margin_loss": lambda t: (t(2, 3), t(2, 3), t(2, 3)),
    "multi_margin_loss": lambda t: (t(2, 3), LABEL),
    "renorm": lambda t: (t(2, 3), 2, 0, 1.0),
    "logsumexp": lambda t: (t(2, 3), [1]),
    "upsample_nearest1d": lambda t: (t(1, 1, 2), [4]),
    "_upsample_nearest_exact1d": lambda t: (t(1, 1, 2), [4]),
    "upsample_nearest2d": lambda t: (t(1, 1, 2, 2), [4, 4]),
    "_upsample_nearest_exact2d": lambda t: (t(1, 1, 2, 2), [4, 4]),
    "upsample_nearest3d": lambda t: (t(1, 1, 2, 2, 2), [4, 4, 4]),
    "_upsample_nearest_exact3d": lambda t: (t(1, 1, 2, 2, 2), [4, 4, 4]),
    "upsample_linear1d": lambda t: (t(1, 1, 2), [4], False),
    "upsample_bilinear2d": lambda t: (t(1, 1, 2, 2), [4, 4], False),
    "_upsample_bilinear2d_aa": lambda t: (t(1, 1, 2, 2), [4, 4], False),
    "upsample_trilinear3d": lambda t: (t(1, 1, 2, 2, 2), [4, 4, 4], False),
    "upsample_bicubic2d": lambda t: (t(1, 1, 2, 2), [4, 4], False),
    "_upsample_bicubic2d_aa": lambda t: (t(1, 1, 2, 2), [4, 4], False),
    "prod.dim_int": lambda t: (t(2, 3), 1),
    "softmax.int": lambda t: (t(2, 3), 1),
    "log_softmax.int": lambda t: (t(2, 3), 1),
    "cumprod": lambda t: (t(2, 3), 1),
    "cumsum": lambda t: (t(2, 3), 1),
    "linalg_matrix_norm": lambda t: (t(2, 3), 1),
    "linalg_matrix_norm.str_ord": lambda t: (t(2, 3), "nuc"),
    "sum.dim_IntList": lambda t: (t(2, 3), [1]),
    "norm.ScalarOpt_dim": lambda t: (t(2, 3), 2, [1]),
    "addcdiv": lambda t: (t(2, 3), t(2, 3), t(2, 3)),
    "addcmul": lambda t: (t(2, 3), t(2, 3), t(2, 3)),
    "bilinear": lambda t: (t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    "cross": lambda t: (t(2, 3), t(2, 3)),
    "dot": lambda t: (t(3), t(3)),
    "vdot": lambda t: (t(3), t(3)),
    "grid_sampler": lambda t: (t(1, 1, 3, 3), t(1, 2, 2, 2), 0, 0, False),
    "index_put": lambda t: (t(3), [LABEL], t(2)),
    "tensordot": lambda t: (t(2, 3), t(3, 2), [1], [0]),
    "scatter_add": lambda t: (t(3), 0, LABEL, t(2)),
}  # fmt: skip
# Ops without a CPU kernel: their arguments are checked instead.
ELSEWHERE: dict[str, Callable[[Make], tuple]] = {
    "_scaled_dot_product_flash_attention": lambda t: (t(1, 2, 8, 8), t(1, 2, 8, 8), t(1, 2, 8, 8)),
    "_thnn_fused_lstm_cell": lambda t: (t(2, 16), t(2, 16), t(2, 4)),
    "_thnn_fused_gru_cell": lambda t: (t(2, 12), t(2, 12), t(2, 4)),
    "cudnn_convolution": lambda t: (
        *(t(1, 2, 5, 5), t(3, 2, 3, 3), ONES, ONES, ONES, 1), *(False, False, False),
    ),
    "cudnn_convolution_transpose": lambda t: (
        *(t(1, 2, 5, 5), t(2, 3, 3, 3), ONES, [0, 0], ONES, ONES, 1), *(False, False, False),
    ),
}  # fmt: skip


def operator(name: str):
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def maker(*dtypes: torch.dtype) -> Make:
    """Return a function that makes tensors with values in (0.2, 0.7), with the given dtypes in turn."""
    generator = torch.Generator().manual_seed(0)
    turn = [0]

    def make(*shape: int) -> torch.Tensor:
        turn[0] += 1
        values = torch.rand(shape, generator=generator) / 2 + 0.2
        return values.to(dtypes[(turn[0] - 1) % len(dtypes)]).requires_grad_()

    return make


def tensors(values) -> list[torch.Tensor]:
    nested = [tensors(value) if isinstance(value, list | tuple) else [value] for value in values]
    return [one for many in nested for one in many if isinstance(one, torch.Tensor)]


def cast(value, dtype: torch.dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return [cast(one, dtype) for one in value] if isinstance(value, list | tuple) else value


# The output type that each list gives, by hand: inputs -> output.
RULES = {
    "lower_precision": [((FP32,), BF16), ((BF16,), BF16)],
    "fp32": [((BF16,), FP32), ((FP32,), FP32)],
    "fp32_set_opt_dtype": [((BF16,), FP32)],
    "fp32_append_dtype": [((BF16,), FP32)],
    "promote": [((BF16, FP32), FP32), ((BF16,), BF16), ((FP32,), FP32)],
}
GRID = [
    (name, inputs, output)
    for name, policy in cuda_policies().items()
    if name in ARGUMENTS
    for inputs, output in RULES[policy]
    # which refuses lower precision, with a dtype or not, on any device
    if not name.startswith("linalg_matrix_norm")
] + [(name, (FP32,), FP32) for name in ("linalg_matrix_norm", "linalg_matrix_norm.str_ord")]


def test_every_op_that_cudas_table_of_kernels_has_is_in_the_lists_and_in_this_grid() -> None:
    table = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    registered = {name.removeprefix("aten::") for name in table}
    assert set(cuda_policies()) == registered
    assert set(ARGUMENTS) | set(ELSEWHERE) | {"binary_cross_entropy"} == registered


@pytest.mark.parametrize(("name", "inputs", "output"), GRID, ids=lambda value: str(value).replace("torch.", ""))
def test_an_op_of_a_list_gives_what_casting_by_hand_gives(name, inputs, output) -> None:
    given = ARGUMENTS[name](maker(*inputs))
    with cuda_autocast_lists(), torch.autocast("cpu", dtype=BF16):
        got = operator(name)(*given)
    # These convert in the kernel and sum in fp32 in both cases; the others convert before it.
    by_dtype = cuda_policies()[name].startswith("fp32_")
    expected = operator(name)(*cast(list(given), FP32 if by_dtype else output))
    for one, other in zip(tensors([got]), tensors([expected]), strict=True):
        assert one.dtype == output
        torch.testing.assert_close(one, other)
    sum(one.float().sum() for one in tensors([got]) if one.requires_grad).backward()
    floats = [one for one in tensors(given) if one.is_floating_point() and one.grad is not None]
    assert floats
    assert all(one.grad.dtype == one.dtype for one in floats)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_op_that_only_cuda_has_is_given_lower_precision(name) -> None:
    class Seen(Exception):
        """An exception that carries the dtypes."""

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is operator(name):
                raise Seen(*(one.dtype for one in tensors(args)))
            return function(*args, **(kwargs or {}))

    given = ELSEWHERE[name](maker(FP32))
    with pytest.raises(Seen) as seen, Look(), cuda_autocast_lists(), torch.autocast("cpu", dtype=BF16):
        operator(name)(*given)
    assert set(seen.value.args) == {BF16}


def test_a_chosen_dtype_is_respected_and_doubles_and_integers_are_left_alone() -> None:
    with cuda_autocast_lists(), torch.autocast("cpu", dtype=BF16):
        x = torch.ones(2, 3, dtype=BF16)
        assert torch.softmax(x, 1, dtype=BF16).dtype == BF16
        assert torch.sum(x, 1, dtype=torch.float64).dtype == torch.float64
        assert torch.sum(torch.ones(2, dtype=torch.int32)).dtype == torch.int64
        double = torch.ones(2, 2, dtype=torch.float64)
        assert torch.mm(double, double).dtype == torch.float64
        assert torch.exp(double).dtype == torch.float64


def test_what_only_the_cpu_casts_is_left_alone() -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3, dtype=BF16)
    with cuda_autocast_lists(), torch.autocast("cpu", dtype=BF16):
        assert torch.stack([y, y]).dtype == BF16
        assert torch.quantile(x, 0.5).dtype == FP32
        assert nn.functional.pad(y[None], (1, 1), "replicate").dtype == BF16  # fp32 on the CPU
        assert torch._addmm_activation(x[0], x, torch.ones(3, 3)).dtype == FP32  # bf16 on the CPU
        assert torch.tanh(y).dtype == BF16


def test_the_banned_op_says_what_to_use() -> None:
    x = torch.full((2,), 0.5)
    with cuda_autocast_lists(), torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match="BCEWithLogits"):
        nn.functional.binary_cross_entropy(x, x)


def test_another_floating_dtype_among_promoted_ones_is_refused_as_cuda_does() -> None:
    with (
        cuda_autocast_lists(),
        torch.autocast("cpu", dtype=BF16),
        pytest.raises(RuntimeError, match="Unexpected floating"),
    ):
        torch.dot(torch.ones(2, dtype=FP16), torch.ones(2, dtype=FP16))


class Copies(TorchDispatchMode):
    """A mode that counts casts."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is aten._to_copy.default
        return function(*args, **(kwargs or {}))


def with_cache(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=BF16):
        layer(layer(x))


def without_cache(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        layer(layer(x))


def two_regions(layer: nn.Linear, x: torch.Tensor) -> None:
    with_cache(layer, x)
    with_cache(layer, x)


def nested_regions(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=BF16):
        layer(x)
        with torch.autocast("cpu", enabled=False):
            layer(x)
        with torch.autocast("cpu", dtype=BF16):
            layer(x)


def frozen(layer: nn.Linear, x: torch.Tensor) -> None:
    with_cache(layer.requires_grad_(False), x)


def no_grad(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.no_grad():
        with_cache(layer, x)


def tied_view(layer: nn.Linear, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=BF16):
        torch.mm(torch.mm(x, layer.weight.t()), layer.weight.t())


@pytest.mark.parametrize(
    ("program", "casts"),
    [
        (with_cache, 3),  # the input, the weight, the bias; then nothing new
        (without_cache, 5),  # the weight and the bias again
        (two_regions, 6),
        (nested_regions, 4),  # the input twice
        (frozen, 5),
        (no_grad, 3),
        (tied_view, 3),  # a view is never kept
    ],
)
def test_weights_are_cast_once_in_a_region_as_torchs_own_cache_does(program, casts) -> None:
    counts = []
    for ours in (True, False):
        layer, x = nn.Linear(4, 4), torch.ones(2, 4)
        with Copies() as copies:
            if ours:
                with cuda_autocast_lists():
                    program(layer, x)
            else:
                program(layer, x)  # the same function of C++, for ops that both lists have
        counts.append(copies.count)
    assert counts == [casts, casts]


def test_a_kept_cast_lives_until_the_outermost_region_ends() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    born: list[torch.Tensor] = []

    class Born(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is aten._to_copy.default and args[0].shape == (4, 4):
                born.append(out.untyped_storage()._weak_ref())
            return out

    def alive() -> bool:
        return not torch.UntypedStorage._expired(born[0])

    with cuda_autocast_lists():
        with torch.autocast("cpu", dtype=BF16), Born():
            with torch.autocast("cpu", dtype=BF16):
                layer(x).sum().backward()
            assert alive()
        assert not alive()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_runs_in_half_precision_as_cudnns_does(cell) -> None:
    torch.manual_seed(0)
    layer, x = cell(3, 4, num_layers=2), torch.randn(5, 2, 3)
    with cuda_autocast_lists(), torch.autocast("cuda", dtype=BF16), Copies() as copies:
        out = layer(x)[0]
    assert out.dtype == FP16
    assert copies.count == (3 if cell is nn.LSTM else 2)  # input and states; the weights go into one buffer
    torch.testing.assert_close(out.float(), layer(x)[0], atol=5e-3, rtol=1e-2)
    out.float().sum().backward()
    assert layer.weight_ih_l0.grad.dtype == FP32


def test_under_fake_tensors_a_step_of_hundred_gigabytes_takes_no_memory() -> None:
    with FakeTensorMode(), cuda_autocast_lists(), Copies() as copies:
        layer = nn.Linear(100_000, 250_000)
        with torch.autocast("cuda"):
            out = layer(torch.empty(1000, 100_000))
        out.sum().backward()
        assert out.dtype == FP16
        assert layer.weight.grad.dtype == FP32
    # input, weight, bias, and the gradients of weight and bias. The gradient of `out` is an expanded scalar.
    assert copies.count == 5


def test_functions_with_their_own_autocast_run_as_on_cuda() -> None:
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP32)
        def forward(ctx, x):
            seen.append((x.dtype, torch.is_autocast_enabled("cuda")))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            seen.append((grad.dtype, torch.is_autocast_enabled("cuda")))
            return 2 * ctx.saved_tensors[0] * grad

    x = torch.ones(2, dtype=BF16, requires_grad=True)
    with cuda_autocast_lists():
        with torch.autocast("cuda", dtype=BF16):
            out = Square.apply(x)
        out.sum().backward()
    assert seen == [(FP32, False), (FP32, False)]
    assert x.grad.dtype == BF16


def test_what_is_asked_of_cuda_is_answered_and_set_back() -> None:
    before = (
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        torch.autocast.__init__,
        torch.get_autocast_dtype("cpu"),
    )
    with cuda_autocast_lists():
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == FP16
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FP16
            with torch.autocast(device_type="cuda", enabled=False):
                assert not torch.is_autocast_enabled("cuda")
                assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FP32
        with torch.amp.autocast("cuda", dtype=BF16):
            assert torch.get_autocast_dtype("cuda") == BF16
            assert torch.get_autocast_gpu_dtype() == BF16
            assert cast_to_lower_precision(torch.ones(1), None)[0].dtype == BF16
        assert cast_to_lower_precision(torch.ones(1))[0].dtype == FP32
        torch.set_autocast_enabled("cuda", True)
        assert torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled(False)
        assert not torch.is_autocast_enabled("cpu")
    after = (
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        torch.autocast.__init__,
        torch.get_autocast_dtype("cpu"),
    )
    assert before == after


def test_every_kernel_is_back_after_an_error() -> None:
    def tables() -> dict[str, str]:
        names = {
            name
            for key in ("AutocastCPU", "AutocastCUDA")
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        } | {"aten::lstm.input", "aten::gru.data"}
        return {name: torch._C._dispatch_dump(name) for name in names}

    before = tables()
    with pytest.raises(ZeroDivisionError), cuda_autocast_lists():
        1 / (tables() == before)
    assert tables() == before
    with torch.autocast("cpu", dtype=BF16):
        y = torch.ones(2, 3, dtype=BF16)
        assert torch.exp(y).dtype == BF16  # fp32 on CUDA
        assert nn.functional.pad(y[None], (1, 1), "replicate").dtype == FP32
        assert torch.stack([y, y.float()]).dtype == FP32


def test_a_context_inside_another_ends_with_the_outer_one() -> None:
    x = torch.ones(2, dtype=BF16)
    with cuda_autocast_lists(), torch.autocast("cuda", dtype=BF16):
        with cuda_autocast_lists():
            assert torch.exp(x).dtype == FP32
        assert torch.exp(x).dtype == FP32
    with torch.autocast("cpu", dtype=BF16):
        assert torch.exp(x).dtype == BF16


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_scaler_for_cuda_is_on_inside_only() -> None:
    with cuda_autocast_lists():
        assert torch.amp.GradScaler("cuda").is_enabled()
    assert torch.amp.GradScaler("cuda").is_enabled() == torch.cuda.is_available()


def test_a_torch_without_the_header_or_a_private_name_is_refused(monkeypatch, tmp_path) -> None:
    cuda_policies.cache_clear()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(DeviceError, match=r"autocast_mode\.h .*: install torch from a wheel"):
        cuda_policies()
    monkeypatch.delattr(torch.library.Library, "_destroy")
    with pytest.raises(DeviceError, match="has no _destroy"), cuda_autocast_lists():
        pass
