"""Traces of trainings of all kinds: their predicted allocations, and the unchanged training and torch."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils as foreach_utils
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import import_utils

from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import DryRun, dry_run, trace_training, untraced
from plimsoll.records.trace import Trace
from workloads import bert, gpt2

IDS = torch.arange(16).view(2, 8)
OPTIMIZERS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam, torch.optim.Adafactor]


def cuda() -> CudaLowering:
    return CudaLowering((8, 0))


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def few_steps(
    model: nn.Module, batch: dict[str, Tensor], lowering: Lowering, loss_of: Callable = lambda out: out.loss
) -> Trace:
    """Trace a training as a user would, from a real model, a real optimizer and a real batch."""
    optimizer = torch.optim.AdamW(model.parameters())

    def train(place: DryRun) -> None:
        fake, its_optimizer = place.fake_training(model.train(), optimizer)
        place.recorder.know_model(fake)
        fake.to(lowering.device)
        for _ in range(3):
            loss = loss_of(fake(**{key: value.to(lowering.device) for key, value in place.fake_batch(batch).items()}))
            loss.backward()
            nn.utils.clip_grad_norm_(fake.parameters(), 1.0)
            its_optimizer.step()
            its_optimizer.zero_grad()

    return trace_training(train, lowering)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", [cuda(), CpuLowering()], ids=lambda lowering: lowering.name)
def test_a_linear_layer_is_counted_to_the_byte(lowering: Lowering):
    # Weight [32, 64] and bias [32] of float32: 8192 + 128 bytes; the batch of 4: 1024; the output: 512.
    trace = few_steps(nn.Linear(64, 32), {"input": torch.zeros(4, 64)}, lowering, loss_of=Tensor.sum)
    live = live_bytes(trace)
    assert live.by_category["parameters"].max() == live.by_category["gradients"].max() == 8192 + 128
    # Two moments of each parameter, and on the CPU two step counts of 4 bytes. On CUDA these are on the host.
    assert live.by_category["optimizer states"].max() == 2 * (8192 + 128) + (8 if lowering.kind == "cpu" else 0)
    assert live.by_category["inputs"].max() == 1024
    assert trace.lowered_to == lowering.name
    assert max(trace.ops.step) == 4  # ops after the third update


def test_a_batch_on_its_way_to_the_device_is_an_input_in_every_step():
    trace = few_steps(nn.Linear(64, 32), {"input": torch.zeros(4, 64)}, cuda(), loss_of=Tensor.sum)
    copies = [row for row, shape in enumerate(trace.storages.shape) if trace.texts[shape] == "float32[4, 64]"]
    copies = [row for row in copies if not trace.storages.on_host[row]]
    assert [trace.storages.category[row] for row in copies] == ["inputs"] * 3
    assert [trace.ops.phase[trace.storages.born[row]] for row in copies] == ["copy"] * 3
    assert [trace.ops.step[trace.storages.born[row]] for row in copies] == [1, 2, 3]


def test_what_is_made_in_the_function_is_known_by_its_module():
    def train(place: DryRun) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()

    live = live_bytes(trace_training(train, CpuLowering()))
    for category in ("parameters", "gradients", "optimizer states"):
        assert live.by_category[category].max() == 4 * (8 * 16 + 16)


# -- nothing real is used or changed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", [cuda(), CpuLowering()], ids=lambda lowering: lowering.name)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_real_training_is_as_it_was_and_its_states_go_on(make: type[torch.optim.Optimizer], lowering: Lowering):
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    )  # small: values of its size could be kept
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    batch = {"x": torch.randn(3, 4), "n": torch.tensor([2, 1, 3])}
    before = [tensor.clone() for tensor in (*model.state_dict().values(), *states_of(optimizer), *batch.values())]
    num_states = len(states_of(optimizer))

    def train(place: DryRun) -> None:
        fake, its_optimizer = place.fake_training(model, optimizer)
        assert len(states_of(its_optimizer)) == num_states
        assert all(isinstance(state, FakeTensor) for state in states_of(its_optimizer))
        fakes = place.fake_batch(batch)
        fakes["n"].add_(1)
        loss = fake(fakes["x"].to(lowering.device)).sum()
        loss.backward()
        its_optimizer.step()

    trace_training(train, lowering)
    after = (*model.state_dict().values(), *states_of(optimizer), *batch.values())
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_of_the_size_of_a_model_is_allocated():
    code = """
import resource, torch
from torch import nn
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import trace_training

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def train(place):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(20)])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(64, width)).sum().backward()
        optimizer.step()

width = 8
trace_training(train, CudaLowering((8, 0)))
before_bytes, width = peak_bytes(), 10_000
trace = trace_training(train, CudaLowering((8, 0)))
numbers = zip(trace.storages.category, trace.storages.num_bytes)
print(peak_bytes() - before_bytes, sum(size for category, size in numbers if category == "parameters"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown_bytes, parameter_bytes = map(int, done.stdout.split())
    assert parameter_bytes == 20 * 4 * (10_000 * 10_000 + 10_000)  # 2 billion numbers
    assert grown_bytes < 200 << 20


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids)).sum()


@pytest.mark.parametrize("lowering", [cuda(), CpuLowering()], ids=lambda lowering: lowering.name)
def test_tied_weights_stay_tied(lowering: Lowering):
    with dry_run(lowering) as place:
        fake = place.fake_model(Tied()).to(lowering.device).half()
        assert fake.head.weight is fake.embedding.weight
        assert isinstance(fake.head.weight, nn.Parameter)
    trace = few_steps(Tied(), {"ids": IDS[:, :4] % 10}, lowering, loss_of=lambda out: out)
    assert live_bytes(trace).by_category["parameters"].max() == 10 * 4 * 4


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.ones(4, 4).tril()
        self.others = {"calls": [torch.tensor(0)]}

    def forward(self, x: Tensor) -> Tensor:
        self.others["calls"][0] += 1
        return (self.linear(x) * self.mask).sum()


@pytest.mark.parametrize("lowering", [cuda(), CpuLowering()], ids=lambda lowering: lowering.name)
def test_tensors_that_are_plain_attributes_are_faked_too(lowering: Lowering):
    model = Masked()
    trace = few_steps(model, {"x": torch.zeros(4, 4)}, lowering, loss_of=lambda out: out)
    assert model.others["calls"][0].item() == 0
    assert live_bytes(trace).by_category["parameters"].max() == 4 * 20


def test_the_optimizer_belongs_to_the_fake_model():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    with dry_run(cuda()) as place:
        fake, its_optimizer = place.fake_training(model, optimizer)
        assert its_optimizer.param_groups[0]["params"][0] is fake.weight
        assert its_optimizer.param_groups[1]["params"][0] is fake.bias
        assert its_optimizer.param_groups[0]["lr"] == 0.5
        assert isinstance(fake.weight, FakeTensor)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert not isinstance(model.weight, FakeTensor)


def test_what_is_one_tensor_in_a_batch_is_one_in_the_fake_and_what_is_no_tensor_stays():
    with dry_run(CpuLowering()) as place:
        fake = place.fake_batch({"input_ids": IDS, "labels": [IDS, "text", None]})
    assert fake["labels"][0] is fake["input_ids"]
    assert fake["labels"][1:] == ["text", None]
    (row,) = [row for row, category in enumerate(place.trace().storages.category) if category == "inputs"]
    assert place.trace().storages.num_bytes[row] == 16 * 8


# -- what is traced ----------------------------------------------------------------------------------------------------


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lowering", [cuda(), CpuLowering()], ids=lambda lowering: lowering.name)
@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (gpt2, {"input_ids": IDS, "labels": IDS}),
        (bert, {"input_ids": IDS, "labels": IDS[:, 0] % 3, "attention_mask": (IDS % 8 < 5).long()}),
        (t5, {"input_ids": IDS, "labels": IDS}),
    ],
)
def test_models_of_hugging_face(build: Callable[[], nn.Module], batch: dict[str, Tensor], lowering: Lowering):
    model = build()
    trace = few_steps(model, batch, lowering)
    parameter_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    live = live_bytes(trace)
    assert live.by_category["parameters"].max() == parameter_bytes
    assert live.by_category["gradients"].max() <= parameter_bytes
    assert not trace.assumptions


class PackedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].sum()


@pytest.mark.parametrize("lowering", [cuda(), CpuLowering()], ids=lambda lowering: lowering.name)
def test_an_lstm_over_packed_sequences(lowering: Lowering):
    batch = {"x": torch.zeros(3, 5, 4), "lengths": torch.tensor([3, 5, 1])}
    trace = few_steps(PackedLstm(), batch, lowering, loss_of=lambda out: out)
    texts, shapes = trace.texts, {trace.texts[shape] for shape in trace.storages.shape}
    assert "float32[9, 4]" in shapes  # 9 tokens in place of 15
    assert live_bytes(trace).by_category["parameters"].max() == 2 * 4 * (4 * 8 * (4 + 8) + 2 * 4 * 8)
    assert not any("assumed to be 0" in texts[number] for number in trace.storages.shape)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def test_a_custom_autograd_function():
    def train(place: DryRun) -> None:
        weight = nn.Parameter(torch.zeros(100, 100, device="cuda"))
        Square.apply(weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.shape == (100, 100)

    trace = trace_training(train, cuda())
    assert max(live_bytes(trace).total) >= 2 * 40_000


def stack(use: Callable) -> Callable[[DryRun], None]:
    def train(place: DryRun) -> None:
        layers = [nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)) for _ in range(4)]
        model = nn.Sequential(*layers).to("cuda")
        hidden = torch.randn(64, 16, device="cuda", requires_grad=True)
        for layer in layers:
            hidden = use(layer, hidden)
        hidden.sum().backward()
        assert next(model.parameters()).grad is not None

    return train


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_holds_the_hidden_states_of_one_layer_only(is_reentrant: bool):
    wide_bytes = 64 * 256 * 4

    def most_wide(use: Callable) -> int:
        trace = trace_training(stack(use), cuda())
        row = live_bytes(trace).peak_row
        return sum(trace.storages.num_bytes[one] == wide_bytes for one in live_bytes(trace).alive_at(row))

    plain = most_wide(lambda layer, hidden: layer(hidden))
    kept = most_wide(lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=is_reentrant))
    assert plain >= 4
    assert kept <= 3


def test_code_written_for_cuda_runs_as_it_is():
    def train(place: DryRun) -> None:
        device = torch.device("cuda", 0)
        model = nn.Linear(4, 4).to("cuda").to(device).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(2, 4, device="cuda:0") + torch.randn(2, 4).to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16
        assert torch.is_autocast_enabled("cuda") is False
        out.float().mean().backward()
        optimizer.step()

    trace_training(train, cuda())


def test_a_training_in_half_precision_with_a_scaler():
    def train(place: DryRun) -> None:
        model = nn.Linear(4, 4).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        assert scaler.is_enabled()
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(2, 4, device="cuda")).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    trace = trace_training(train, cuda())
    assert live_bytes(trace).by_category["optimizer states"].max() == 2 * 4 * 20  # the update was not skipped


# -- what cannot be traced ---------------------------------------------------------------------------------------------


@pytest.fixture
def op_without_fake() -> Iterator[str]:
    library = torch.library.Library("plimsoll_tests", "FRAGMENT")
    library.define("no_fake(Tensor x) -> Tensor")
    library.impl("no_fake", lambda x: x.clone(), "CPU")
    yield "plimsoll_tests.no_fake"
    library._destroy()


def test_an_op_without_a_fake_version_is_named_with_the_line(op_without_fake: str):
    def train(place: DryRun) -> None:
        torch.ops.plimsoll_tests.no_fake(torch.zeros(3))

    line = train.__code__.co_firstlineno + 1
    with pytest.raises(InputError, match=rf"{op_without_fake}.* at .*test_memory_trace\.py:{line} .*register_fake"):
        trace_training(train, cuda())


def test_what_depends_on_unknown_values_is_named_with_the_line():
    def train(place: DryRun) -> None:
        torch.unique_consecutive(torch.randn(10_000))

    line = train.__code__.co_firstlineno + 1
    with pytest.raises(InputError, match=rf"unique.* at .*test_memory_trace\.py:{line} "):
        trace_training(train, cuda())


def test_as_many_elements_as_there_can_be_are_assumed_of_nonzero():
    shapes = []

    def train(place: DryRun) -> None:
        shapes.append((torch.randn(5000, 4, device="cuda") > 0).nonzero().shape)

    line = train.__code__.co_firstlineno + 1
    (assumption,) = trace_training(train, cuda()).assumptions
    assert assumption.text.startswith("aten.nonzero.default was assumed to keep every element at ")
    assert assumption.text.endswith(f"test_memory_trace.py:{line}")
    assert shapes == [(20_000, 2), (1, 2)]  # the second trace shows how much less it may need
    # With all elements, the peak holds the mask and the indices; with one, the numbers and the mask.
    assert assumption.low_bytes == (20_000 * 4 + 20_000) - (20_000 + 20_000 * 2 * 8)
    assert assumption.high_bytes == 0


def test_nonzero_of_a_mask_in_the_batch_is_known():
    def train(place: DryRun) -> None:
        mask = place.fake_batch({"mask": torch.tensor([[1, 0, 1], [1, 1, 0]])})["mask"]
        assert mask.nonzero().shape == (4, 2)

    assert trace_training(train, CpuLowering()).assumptions == ()


# -- torch is as it was ------------------------------------------------------------------------------------------------


def patched_things() -> list:
    return [
        nn.Module._apply,
        nn.RNNBase.flatten_parameters,
        list(optimizer_module._foreach_supported_types),
        list(foreach_utils._foreach_supported_types),
        optimizer_module._get_foreach_kernels_supported_devices,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype("cpu"),
        torch.amp.autocast_mode.autocast.__init__,
        torch.amp.autocast_mode._cast,
        torch.clear_autocast_cache,
        torch.nn.modules.module._global_forward_hooks.copy(),
        torch.nn.modules.module._global_forward_pre_hooks.copy(),
        optimizer_module._global_optimizer_post_hooks.copy(),
        sorted(torch._C._dispatch_get_registrations_for_dispatch_key("CPU")),
        sorted(torch._C._dispatch_get_registrations_for_dispatch_key("AutogradCPU")),
        sorted(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")),
    ]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("lowering", [cuda(), CpuLowering()], ids=lambda lowering: lowering.name)
def test_everything_in_torch_is_as_it_was_also_after_an_error(lowering: Lowering, fails: bool):
    def train(place: DryRun) -> None:
        fake = place.fake_model(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))).to(lowering.device)
        fake[0](torch.randn(2, 2)).sum().backward()
        if fails:
            fake[0](torch.randn(2, 3))

    torch.manual_seed(0)
    x = torch.randn(2, 1, 3, 4, requires_grad=True)
    layer = nn.LSTM(4, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x[:, 0], torch.tensor([3, 1]), batch_first=True)
    before, lstm = patched_things(), layer(packed)[0].data
    attention = nn.functional.scaled_dot_product_attention(x, x, x)
    if fails:
        with pytest.raises(InputError, match="RuntimeError: (a and b must have same reduction dim|mat1 and mat2)"):
            trace_training(train, lowering)
    else:
        trace_training(train, lowering)
    assert patched_things() == before
    assert torch.equal(layer(packed)[0].data, lstm)
    again = nn.functional.scaled_dot_product_attention(x, x, x)
    assert torch.equal(again, attention)
    assert again.grad_fn.name() == attention.grad_fn.name()
    assert not isinstance(torch.zeros(1), FakeTensor)


def test_fake_tensors_pass_for_real_ones_inside_the_block_only():
    asked = import_utils.is_fake_tensor
    fake = FakeTensorMode().from_tensor(torch.ones(2))
    with untraced():
        assert not import_utils.is_tracing(fake)
    assert import_utils.is_tracing(fake)
    assert import_utils.is_fake_tensor is asked


def test_a_model_without_padding_builds_no_mask_although_its_tensors_are_fake():
    """GPT-2 searches given positions for packed sequences."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=4, n_head=2, n_layer=1, n_positions=8))
    model.config.use_cache = False

    def train(place: DryRun) -> None:
        ids = place.fake_batch(torch.zeros(2, 8, dtype=torch.int64))
        place.fake_model(model)(input_ids=ids, position_ids=place.fake_batch(torch.arange(8)[None]), labels=ids)

    trace = trace_training(train, CpuLowering())
    shapes = {trace.texts[shape] for shape in trace.storages.shape}
    assert "bool[2, 1, 8, 8]" not in shapes
