"""The assignment of memory to device or host, as the trace of user code shows it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import DryRun, dry_run, trace_training


def places_of(make) -> list[bool]:
    """Return whether each storage that `make` creates is on the host, in order of birth."""

    def train(place: DryRun) -> None:
        kept.append(make())

    kept: list = []
    return list(trace_training(train, CudaLowering((8, 0))).storages.on_host)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.tensor(0.0),
        lambda: torch.zeros(3),
        lambda: torch.empty(3),
        lambda: torch.arange(3),
        lambda: torch.randn(3),
        lambda: torch.randperm(3),
        lambda: torch.zeros(3, device=None),
        lambda: nn.Parameter(torch.ones(3)),
        lambda: torch.zeros(3).add_(1),
    ],
)
def test_what_is_made_without_a_device_is_on_the_host(make):
    assert set(places_of(make)) == {True}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.zeros(3, device="cuda:1"),
        lambda: torch.zeros(3, device=0),
        lambda: torch.randn(3, device=torch.device("cuda")),
        lambda: torch.full((3,), 1.0, device="cuda").mul(2),
        lambda: torch.zeros_like(torch.empty(3, device="cuda")),
        lambda: torch.empty(3, device="cuda").new_zeros(5),
    ],
)
def test_what_is_made_on_the_device_and_from_it_is_there(make):
    assert set(places_of(make)) == {False}


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to("cuda"),
        lambda x: x.to(torch.device("cuda", 0)),
        lambda x: x.to(device="cuda"),
        lambda x: x.to("cuda", non_blocking=True),
        lambda x: x.to(0),
        lambda x: x.to(device=0),
        lambda x: x.cuda(),
        lambda x: x.cuda(0, non_blocking=True),
        lambda x: x.to(torch.zeros(1, device="cuda").device),
    ],
)
def test_what_is_moved_is_on_the_host_first_and_then_on_the_device(move):
    places = places_of(lambda: move(torch.zeros(1000)))
    assert places[0] is True
    assert places[-1] is False
    assert places.count(True) == 1


def test_moving_what_is_there_takes_nothing():
    def make() -> Tensor:
        x = torch.zeros(3, device="cuda")
        assert x.to("cuda") is x
        assert x.cuda() is x
        return x

    assert places_of(make) == [False]


def test_a_change_of_type_stays_where_it_is():
    assert places_of(lambda: torch.zeros(3).to(torch.float16)) == [True, True]
    assert places_of(lambda: torch.zeros(3, device="cuda").to(torch.float16)) == [False, False]
    assert places_of(lambda: torch.zeros(3, device="cuda").half()) == [False, False]


def test_cpu_copies_to_the_host_once():
    def make() -> list[Tensor]:
        x = torch.zeros(3, device="cuda")
        y = x.cpu()
        assert y.cpu() is y
        return [x, y, y + 1]

    assert places_of(make) == [False, True, True]


def test_what_is_computed_of_both_is_on_the_device():
    # A number on the host may be combined with a tensor of the device.
    assert places_of(lambda: torch.zeros(3, device="cuda") * torch.tensor(2.0))[-1] is False


def test_a_batch_is_on_the_host_until_it_is_moved():
    def train(place: DryRun) -> None:
        batch = place.fake_batch({"x": torch.zeros(1000)})
        assert batch["x"].to("cuda").sum() is not None

    trace = trace_training(train, CudaLowering((8, 0)))
    assert live_bytes(trace, on_host=True).peak_bytes == 4000
    assert live_bytes(trace).peak_bytes == 4000 + 4


def test_optimizers_count_their_steps_on_the_host():
    def train(place: DryRun) -> None:
        model = nn.Linear(10, 10).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 10, device="cuda")).sum().backward()
            optimizer.step()
        kept.append(optimizer)

    kept: list = []
    trace = trace_training(train, CudaLowering((8, 0)))
    states = [row for row, category in enumerate(trace.storages.category) if category == "optimizer states"]
    on_host = [trace.storages.num_bytes[row] for row in states if trace.storages.on_host[row]]
    on_device = [trace.storages.num_bytes[row] for row in states if not trace.storages.on_host[row]]
    assert on_host == [4, 4]
    assert sorted(on_device) == [40, 40, 400, 400]  # two moments of a bias and a weight


def test_steps_that_were_counted_before_the_trace_are_on_the_host_too():
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 10)).sum().backward()
    optimizer.step()

    def train(place: DryRun) -> None:
        fake, its_optimizer = place.fake_training(model, optimizer)
        fake(torch.randn(2, 10, device="cuda")).sum().backward()
        its_optimizer.step()
        kept.append(its_optimizer)

    kept: list = []
    trace = trace_training(train, CudaLowering((8, 0)))
    states = [row for row, category in enumerate(trace.storages.category) if category == "optimizer states"]
    assert sorted(trace.storages.num_bytes[row] for row in states if trace.storages.on_host[row]) == [4, 4]
    assert sorted(trace.storages.num_bytes[row] for row in states if not trace.storages.on_host[row]) == [
        *(40, 40, 400, 400)
    ]


def test_a_model_of_the_user_is_taken_to_be_on_the_device_and_stays_the_same_object():
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters())
    with dry_run(CudaLowering((8, 0))) as place:
        place.recorder.step = 1
        fake, its_optimizer = place.fake_training(model, optimizer)
        weight = fake.weight
        fake.to("cuda").cuda()
        assert fake.weight is weight is its_optimizer.param_groups[0]["params"][0]
        place.recorder.know_model(fake)
    trace = place.trace()
    assert [size for size, host in zip(trace.storages.num_bytes, trace.storages.on_host, strict=True) if not host] == [
        *(400, 40)
    ]


def test_a_model_made_in_the_function_is_on_the_host_until_it_is_moved():
    def train(place: DryRun) -> None:
        model = nn.Linear(100, 100, bias=False)
        model.to("cuda")
        assert copy.deepcopy(model).weight is not model.weight

    trace = trace_training(train, CudaLowering((8, 0)))
    assert live_bytes(trace, on_host=True).peak_bytes == 40_000
    assert live_bytes(trace, on_host=True).total[-1] == 0
    assert live_bytes(trace).peak_bytes == 80_000  # the model and its copy


def test_cuda_is_not_known_outside():
    if torch.cuda.is_available():
        pytest.skip("this build of torch knows CUDA")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(3, device="cuda")
