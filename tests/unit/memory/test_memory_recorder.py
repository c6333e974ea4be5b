"""Records of small trainings: births, deaths, categories, modules, lines and phases, by hand."""

import re
from typing import Any

import pytest
import torch
from memory_traces import recorded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Square(torch.autograd.Function):
    """A custom function, whose forward runs with gradients disabled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Net(nn.Module):
    """Two layers, with `function` between them."""

    def __init__(self, function: Any = torch.relu) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.function(self.first(x))
        return self.second(hidden)


def test_every_storage_has_its_purpose():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.ones(3, 4)
    with recorded(lambda recorder: recorder.know([("x", x)], "inputs")) as found:
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
    weights = ["float32[2, 6]", "float32[2]", "float32[6, 4]", "float32[6]"]
    assert found.of("inputs") == ["float32[3, 4]"]
    assert sorted(found.of("parameters")) == weights
    assert sorted(found.of("gradients")) == ["float32[1, 2]", "float32[1, 6]", "float32[2, 6]", "float32[6, 4]"]
    # Adam's step count and two averages for each parameter
    assert sorted(found.of("optimizer states")) == sorted([*weights, *weights, *["float32[]"] * 4])
    # The output of relu, the scores, the loss and its gradient. The input of relu dies in the forward pass.
    assert found.of("activations") == ["float32[3, 6]", "float32[3, 2]", "float32[]", "float32[]"]


def test_a_storage_is_born_once_and_dies_with_its_last_view():
    with recorded() as found:
        base = torch.zeros(4)
        view = base.view(2, 2)
        base.add_(1)
        del base
        torch.ones(3)
        del view
        torch.ones(5)
    rows = [(row.shape, row.born_at, row.died_at) for row in found.rows()]
    assert rows == [
        ("float32[4]", "zeros", "ones"),
        ("float32[3]", "ones", "ones"),
        ("float32[5]", "ones", "ones"),
    ]
    assert found.trace.events == (1, 2, -2, -1, 3, -3)


def test_two_micro_batches_add_into_the_same_gradients():
    net = nn.Linear(2, 1, bias=False)
    with recorded() as found:
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
    gradients = [row for row in found.rows() if row.category == "gradients"]
    assert [row.shape for row in gradients] == ["float32[1, 2]"]
    assert gradients[0].died_at == ""


def test_a_retained_graph_keeps_its_activations():
    x = torch.ones(2, requires_grad=True)
    with recorded() as found:
        loss = x.exp().sum()
        loss.backward(retain_graph=True)
        torch.ones(7)
    result = next(row for row in found.rows() if row.born_at == "exp")
    assert (result.category, result.died_at) == ("activations", "")
    with recorded() as freed:
        loss.backward()
        torch.ones(7)
        del loss
    assert len(freed.rows()) > 0


def test_what_is_recomputed_belongs_to_its_module_again():
    net = Net(lambda hidden: checkpoint(torch.exp, hidden, use_reentrant=False))
    with recorded() as found:
        net(torch.ones(3, 4)).sum().backward()
    ops = found.trace.ops
    places = [
        (ops.phase[row], found.trace.texts[ops.module[row]])
        for row, name in enumerate(ops.name)
        if found.trace.texts[name] == "aten.exp.default"
    ]
    assert places[0] == ("forward", "Net")
    assert [phase for phase, _ in places] == ["forward", "backward"]


def test_what_autograd_calls_by_itself_is_told_from_what_python_calls():
    net = Net(lambda hidden: checkpoint(torch.exp, Square.apply(hidden), use_reentrant=False))
    with recorded() as found:
        net(torch.ones(3, 4)).sum().backward()
    ops = found.trace.ops
    called: dict[tuple[str, str], list[bool]] = {}
    for name, phase, by_autograd in zip(ops.name, ops.phase, ops.by_autograd, strict=True):
        called.setdefault((found.trace.texts[name], phase), []).append(by_autograd)
    assert not any(sum(calls) for (_, phase), calls in called.items() if phase != "backward")
    assert called["aten.exp.default", "backward"] == [False]  # recomputed
    assert called["aten.mul.Tensor", "backward"] == [True, False, False]  # of exp, and two of Square's in Python
    assert all(called["aten.mm.default", "backward"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_is_named_in_forward_and_backward(reentrant: bool):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    outer, x = Outer(), torch.ones(2, 4, requires_grad=True)
    with recorded() as found:
        outer(x).sum().backward()
    products = [row for row in found.rows() if row.born_at == "addmm"]
    assert [(row.module, row.phase) for row in products] == [("inner.0", "forward"), ("inner.0", "backward")]


def test_a_custom_function_is_part_of_the_forward_pass():
    net = Net(Square.apply)
    with recorded() as found:
        net(torch.ones(3, 4)).sum().backward()
    squared = next(row for row in found.rows() if row.born_at == "mul")
    assert (squared.phase, squared.category, squared.module) == ("forward", "activations", "Net")


def test_a_model_without_gradients_is_evaluated():
    net = Net()
    with recorded() as found, torch.no_grad():
        net(torch.ones(3, 4))
    made = [row for row in found.rows() if row.category != "parameters"][1:]
    assert {(row.phase, row.category) for row in made} == {("evaluation", "temporaries")}


def test_a_backward_op_belongs_to_the_module_and_line_of_its_forward():
    net = Net()
    with recorded() as found:
        net(torch.ones(3, 4)).sum().backward()
    trace = found.trace
    backward = {
        trace.texts[trace.ops.name[row]]: (trace.texts[trace.ops.module[row]], trace.texts[trace.ops.line[row]])
        for row, phase in enumerate(trace.ops.phase)
        if phase == "backward"
    }
    module, line = backward["aten.threshold_backward.default"]
    assert module == "Net"
    assert re.search(r"test_memory_recorder\.py:\d+$", line)
    assert backward["aten.mm.default"][0] in {"first", "second"}


def test_sparse_gradients_are_gradients():
    table = nn.Embedding(100, 4, sparse=True)
    with recorded() as found:
        table(torch.tensor([1, 5, 5])).sum().backward()
    assert sorted(found.of("gradients")) == ["float32[3, 4]", "int64[1, 3]"]


def test_a_step_ends_with_the_optimizers_and_its_ops_are_told():
    net, x, target = nn.Linear(2, 1), torch.ones(1, 2), torch.ones(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recorded() as found:
        for _ in range(2):
            functional.mse_loss(net(x.clone()), target).backward()
            optimizer.step()
    steps_and_phases = list(dict.fromkeys(zip(found.trace.ops.step, found.trace.ops.phase, strict=True)))
    of_one_step = ["copy", "forward", "loss", "backward", "optimizer"]
    for step in (1, 2):
        assert [phase for number, phase in steps_and_phases if number == step] == of_one_step


def test_the_model_is_as_it_was_afterwards():
    net = Net()
    with recorded():
        net(torch.ones(3, 4)).sum().backward()
    assert not net._forward_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())


def test_a_storage_freed_and_taken_back_in_place_is_two_with_one_name():
    weight = torch.ones(10)
    with recorded(lambda recorder: recorder.know([("weight", weight)], "parameters")) as found:
        storage = weight.untyped_storage()
        storage.resize_(0)
        other = weight.new_ones(3)
        storage.resize_(40)
        storage.resize_(40)
    storages = found.trace.storages
    rows = [row for row, num_bytes in enumerate(storages.num_bytes) if num_bytes == 40]
    assert [found.trace.texts[storages.name[row]] for row in rows] == ["weight", "weight"]
    assert [storages.category[row] for row in rows] == ["parameters", "parameters"]
    first, second = rows
    assert [abs(event) - 1 for event in found.trace.events] == [first, first, 1, second]
    assert other.numel() == 3
