"""Ops that a lowering replaces, compared with torch on real tensors; the replacement is undone."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils as foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.memory.lowering.base import fake_modules_can_be_converted, foreach_as_on, kernels_replaced
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import trace_training


class Names(TorchDispatchMode):
    """A mode that records the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ops_of(run) -> list[str]:
    with Names() as recorded:
        run()
    return recorded.names


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_a_kernel_is_replaced_with_and_without_autograd_and_put_back():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    with kernels_replaced({"relu": lambda input: input * 10}):
        out = torch.relu(x)
        assert out.tolist() == [10.0, -20.0]
        out.sum().backward()
        with torch.no_grad():
            assert nn.ReLU()(x).tolist() == [10.0, -20.0]
    assert x.grad is not None
    assert x.grad.tolist() == [10.0, 10.0]
    out = torch.relu(x)
    assert out.tolist() == [1.0, 0.0]
    assert out.grad_fn is not None
    assert out.grad_fn.name() == "ReluBackward0"


def test_an_overload_is_replaced_alone():
    x = torch.tensor([4.0])
    with kernels_replaced({"pow.Tensor_Scalar": lambda input, exponent: input}):
        assert torch.pow(x, 2).item() == 4.0
        assert torch.pow(x, torch.tensor(2.0)).item() == 16.0


def test_kernels_are_put_back_after_an_error():
    x = torch.tensor([-1.0])
    with pytest.raises(ZeroDivisionError), kernels_replaced({"relu": lambda input: input}):
        raise ZeroDivisionError
    assert torch.relu(x).item() == 0.0


# -- foreach -----------------------------------------------------------------------------------------------------------


def update(fake: bool, devices: tuple[str, ...] | None) -> list[str]:
    """Return the ops of an AdamW update of two parameters."""

    def run() -> None:
        parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()

    if not fake:
        return ops_of(run)
    with foreach_as_on(devices or ()), FakeTensorMode():
        return ops_of(run)


def test_adamw_loops_on_the_cpu_as_with_real_parameters():
    real = update(fake=False, devices=None)
    assert "_foreach_add_" not in real
    # A fake scalar is read with another op; the ops that allocate are the same.
    steps = {"addcdiv_", "mul_", "lerp_", "addcmul_", "sqrt"}
    fake = update(fake=True, devices=("cuda", "xpu"))
    assert [name for name in fake if name in steps] == [name for name in real if name in steps]


def test_adamw_takes_foreach_where_it_is_the_default():
    names = update(fake=True, devices=("cpu", "cuda"))
    assert {"_foreach_add_", "_foreach_lerp_", "_foreach_addcdiv_", "_foreach_sqrt"} <= set(names)
    assert "addcdiv_" not in names


def clip(fake: bool, devices: tuple[str, ...]) -> list[str]:
    def run() -> None:
        parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        nn.utils.clip_grad_norm_(parameters, 1.0)

    if not fake:
        return ops_of(run)
    with foreach_as_on(devices), FakeTensorMode():
        return ops_of(run)


@pytest.mark.parametrize("devices", [("cuda", "xpu"), ("cpu", "cuda", "xpu")])
def test_clipping_takes_foreach_on_both_as_with_real_gradients(devices: tuple[str, ...]):
    real = [name for name in clip(fake=False, devices=devices) if "foreach" in name]
    assert real == ["_foreach_norm", "_foreach_mul_"]
    assert [name for name in clip(fake=True, devices=devices) if "foreach" in name] == real


def test_foreach_is_put_back_after_an_error():
    lists = [module._foreach_supported_types for module in (optimizer_module, foreach_utils)]
    before = [list(known) for known in lists], optimizer_module._get_foreach_kernels_supported_devices

    def fail() -> None:
        with foreach_as_on(("cpu",)):
            assert all(FakeTensor in known for known in lists)
            assert optimizer_module._get_foreach_kernels_supported_devices() == ["cpu"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ([list(known) for known in lists], optimizer_module._get_foreach_kernels_supported_devices) == before


# -- conversions -------------------------------------------------------------------------------------------------------


def fake_training():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    return model, optimizer


@pytest.mark.parametrize(
    "convert", [lambda model: model.half(), lambda model: model.to(torch.float16), lambda model: model.to("cpu").half()]
)
def test_a_fake_module_is_converted_in_place_as_a_real_one(convert):
    def dtypes_after(make):
        model, optimizer = make()
        parameters = list(model.parameters())
        assert convert(model) is model
        held = optimizer.param_groups[0]["params"]
        assert all(one is other for one, other in zip(held, parameters, strict=True))
        assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
        assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in held)
        return (
            [parameter.dtype for parameter in held],
            [parameter.grad.dtype for parameter in held],
            {name: buffer.dtype for name, buffer in model.named_buffers()},
            [parameter.untyped_storage().nbytes() for parameter in held],
        )

    real = dtypes_after(fake_training)
    with fake_modules_can_be_converted(), FakeTensorMode():
        fake = dtypes_after(fake_training)
    assert fake == real
    assert fake[2]["1.num_batches_tracked"] is torch.int64
    assert fake[3] == [24, 6, 6, 6]


def test_converting_what_is_so_already_makes_nothing_new():
    with fake_modules_can_be_converted(), FakeTensorMode():
        model, _ = fake_training()
        storages = [parameter.untyped_storage()._cdata for parameter in model.parameters()]
        assert set(ops_of(lambda: model.float())) <= {"device"}  # which is only asked
        assert [parameter.untyped_storage()._cdata for parameter in model.parameters()] == storages


def test_tied_and_missing_parameters_are_converted():
    with fake_modules_can_be_converted(), FakeTensorMode():
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        second.weight = first.weight
        model = nn.Sequential(first, second).half()
        assert model[0].weight is model[1].weight
        assert model[0].bias is None
        assert model[0].weight.dtype is torch.float16


def test_apply_is_put_back_after_an_error():
    before = nn.Module._apply

    def fail() -> None:
        with fake_modules_can_be_converted():
            assert nn.Module._apply is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert nn.Module._apply is before


def outputs_of(is_contiguous, has_bias=True):
    """Return how many tensors of the output's size the forward of a linear layer makes."""

    def step(place):
        layer = nn.Linear(4, 5, bias=has_bias).to("cuda")
        given = torch.zeros(2, 3, 4, device="cuda")
        out = layer(given if is_contiguous else given.transpose(0, 1))
        out.sum().backward()
        assert layer.weight.grad is not None

    trace = trace_training(step, CudaLowering((9, 0)))
    ops, storages = trace.ops, trace.storages
    return sum(
        num_bytes == 2 * 3 * 5 * 4 and ops.phase[born] == "forward"
        for num_bytes, born in zip(storages.num_bytes, storages.born, strict=True)
    )


def test_the_bias_is_added_in_place():
    assert [outputs_of(True), outputs_of(False), outputs_of(False, has_bias=False)] == [1, 1, 1]


def test_real_results_and_gradients_are_those_of_torch():
    from plimsoll.memory.lowering.base import LINEAR

    for given in (torch.randn(3, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4).transpose(0, 1), torch.randn(4)):
        weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
        results = [linear(given, weight, bias) for linear in (LINEAR["linear"], nn.functional.linear)]
        torch.testing.assert_close(*results)
        ours, theirs = (torch.autograd.grad(result.sum(), (weight, bias)) for result in results)
        torch.testing.assert_close(ours, theirs)
