"""Operations that a replay could not repeat are found among the operators of a pass. The meta device plays a GPU."""

import pytest
import torch

from plimsoll.step.cuda_graphs.survey import ReadAgain, Survey

META, CPU = torch.device("meta"), torch.device("cpu")
HELD = torch.full((), 2.0)


def surveyed(work, device=META):
    survey, x = Survey(device), torch.ones(4, 4, device=device)
    survey.of(lambda: work(x))
    return survey


@pytest.mark.parametrize(
    "work",
    [
        lambda x: (x @ x).relu().sum(),
        lambda x: x * 2.5 + 1,
        lambda x: x + torch.tensor(2.0),  # a number that Python has, which a kernel takes as an argument
        lambda x: x[torch.arange(2, device=x.device)],
        lambda x: torch.nn.functional.dropout(x),
        lambda x: torch.arange(4) * 2,  # on the host, of nothing but Python, and for nothing
    ],
    ids=["products", "number", "tensor of a number", "index", "dropout", "host"],
)
def test_what_kernels_do_on_the_device_is_let_through(work):
    assert surveyed(work).reason is None


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda x: torch.ones_like(x, device="cpu"), "copies between the host and the device"),
        (lambda x: torch.ones(4).to(x.device) + x, "copies between the host and the device"),
        (lambda x: x.copy_(torch.ones(4, 4)), "copies between the host and the device"),
        (lambda x: x * HELD, "reads a host tensor, and replays would reuse its value from the capture"),
        (lambda x: torch.ones(()) * HELD, "reads a host tensor"),
        (lambda x: x.normal_(generator=torch.Generator()), "draws from a random generator of the program"),
    ],
)
def test_what_the_host_has_a_part_in_is_named(work, why):
    device = CPU if "generator" in why else META  # which takes none
    assert why in surveyed(work, device).reason


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda x: x.sum().item(), "`_local_scalar_dense` at test_step_cuda_graphs_survey.py:"),
        (lambda x: bool((x > 0).all()), "hands Python a value that depends on the data"),
        (lambda x: x[x > 0], "returns a result whose size depends on the data"),
        (lambda x: x.nonzero(), "`nonzero` at test_step_cuda_graphs_survey.py:"),
        (lambda x: torch.rand(1).item(), "hands Python a value that depends on the data"),
        (lambda x: torch.equal(x, x * 1), "depends on the data"),
    ],
)
def test_what_values_decide_is_named_with_its_line(work, why):
    assert why in surveyed(work, CPU).reason


def test_the_seed_that_attention_returns_beside_its_result_is_let_through():
    with torch.library._scoped_library("plimsoll_tests", "DEF") as library:
        library.define("attend(Tensor x) -> (Tensor, Tensor)")
        library.define("attend_backward(Tensor gradient, Tensor seed) -> Tensor")
        library.impl("attend", lambda x: (torch.empty_like(x), torch.zeros((), dtype=torch.long)), "Meta")
        library.impl("attend_backward", lambda gradient, seed: torch.empty_like(gradient), "Meta")

        def work(x):
            result, seed = torch.ops.plimsoll_tests.attend(x)
            return torch.ops.plimsoll_tests.attend_backward(result, seed)

        assert surveyed(work).reason is None


def positions(x):
    counted = torch.arange(x.shape[1]).diff(prepend=torch.tensor([-1]))
    return x * 3 if bool((counted == 1).all()) and counted.sum().item() == 4 else x


def test_values_of_nothing_but_python_are_read_and_told_again_in_order():
    survey = surveyed(positions, CPU)
    assert survey.reason is None
    assert survey.read == [True, 4]
    x = torch.ones(2, 4)
    with ReadAgain(survey.read):
        tripled = positions(x)
    with ReadAgain([False]):
        same = positions(x)
    assert (tripled.sum(), same.sum()) == (24, 8)


def test_what_is_written_with_data_is_no_longer_constant():
    def work(x):
        buffer = torch.zeros(4)
        buffer.add_(x[0])
        return buffer.sum().item()

    assert "depends on the data" in surveyed(work, CPU).reason


def test_a_value_that_is_read_in_backward_is_not_told_again():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.ones(()).item()

    def work(x):
        Reads.apply(x.requires_grad_()).sum().backward()

    assert "hands Python a value" in surveyed(work, CPU).reason
