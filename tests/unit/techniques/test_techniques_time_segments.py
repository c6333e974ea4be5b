"""Exact backpropagation through time: the cut layers, the choices, refusals, and saved tensors."""

import copy
from math import isqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from traced_steps import dry_run, recorded

from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.models.recurrent.cells import UnrolledCell
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.recurrent.segments import Passed
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice
from plimsoll.techniques import Setting, conflict_among, installed
from plimsoll.techniques.checkpointing import checkpointing_choice
from plimsoll.techniques.time_segments import TimeSegments, parts_in_time, segment_lengths, time_segments_choice
from technique_models import fresh

FIELDS = {"architecture": "lstm", "vocab_size": 30, "embedding_size": 8, "hidden_size": 8, "num_layers": 2}
LONG = Setting("cpu", 4, sequence_length=1000)


def workload_of(model, units="next-tokens"):
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, units)


class Mixed(nn.Module):
    """A model with all kinds of layers that can be cut, and some that cannot."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.layers = nn.ModuleDict({"lstm": nn.LSTM(8, 8), "cell": UnrolledCell(nn.GRUCell(8, 8))})
        self.head = nn.Linear(8, 30)

    def forward(self, input_ids, labels):
        hidden, _ = self.layers["lstm"](self.embedding(input_ids).transpose(0, 1))
        hidden, _ = self.layers["cell"](hidden)
        loss = nn.functional.cross_entropy(self.head(hidden.transpose(0, 1)).flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})


def batch(num_steps=23, num_samples=4):
    ids = torch.randint(0, 30, (num_samples, num_steps), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


# -- what is cut -------------------------------------------------------------------------------------------------------


def test_a_model_that_says_how_is_cut_as_a_whole_and_else_its_layers():
    whole = build_recurrent(FIELDS)
    assert parts_in_time(whole) == [whole]
    mixed = Mixed()
    assert parts_in_time(mixed) == [mixed.layers["lstm"], mixed.layers["cell"]]
    both = build_recurrent(FIELDS | {"num_labels": 2, "bidirectional": True})
    assert parts_in_time(both) == [both.recurrent]


@pytest.mark.parametrize("choice", [time_segments_choice(5), time_segments_choice(0), time_segments_choice(2, kept=3)])
def test_gradients_of_a_mixed_model(choice):
    torch.manual_seed(0)
    plain = Mixed().double()
    other = copy.deepcopy(plain)
    model_loss(plain, batch()).backward()
    with installed(workload_of(other), [choice]):
        model_loss(other, batch()).backward()
    for one, expected in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_everything_is_itself_again():
    model = Mixed()
    with installed(workload_of(model), [time_segments_choice(4)]):
        assert [name for name, part in model.named_modules() if "forward" in vars(part)] == [
            "layers.lstm",
            "layers.cell",
        ]
    assert not any("forward" in vars(part) for part in model.modules())


# -- what is offered and refused ---------------------------------------------------------------------------------------


def test_the_choices_go_down_to_what_still_pays():
    available = TimeSegments().choices(workload_of(build_recurrent(FIELDS)), LONG)
    assert [dict(choice.options) for choice in available] == [{"steps": 128}, {"steps": 32}]
    assert list(segment_lengths(32)) == []


def test_of_very_many_segments_it_also_offers_to_keep_fewer_states():
    setting = Setting("cpu", 4, sequence_length=100_000)
    available = TimeSegments().choices(workload_of(build_recurrent(FIELDS)), setting)
    assert dict(available[-1].options) == {"steps": 16, "kept": 390}


@pytest.mark.parametrize(
    ("model", "setting", "reason"),
    [
        (lambda: fresh("gpt2")[0], LONG, "has no recurrent layers"),
        (Mixed, Setting("cpu", 4, sequence_length=40), "sequences of 40 steps are too short to be cut"),
    ],
)
def test_where_there_is_nothing_to_cut_it_says_so(model, setting, reason):
    assert reason in TimeSegments().choices(workload_of(model()), setting)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ([time_segments_choice(-1)], "steps is -1: give a whole number, 0 for the default"),
        ([time_segments_choice(4, kept=-2)], "kept is -2: give a whole number, 0 for all"),
        (
            [Choice(technique="truncated_bptt", options={"steps": 4}), time_segments_choice(4)],
            "cuts the same sequences",
        ),
    ],
)
def test_what_cannot_be_is_refused(choices, reason):
    setting = Setting("cpu", 4, sequence_length=1000, allow=frozenset({"truncated_bptt"}))
    assert reason in conflict_among(tuple(choices), workload_of(build_recurrent(FIELDS)), setting)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(8, 8) for _ in range(3))


def test_layers_are_not_recomputed_twice():
    choices = (time_segments_choice(4), checkpointing_choice("all"))
    assert "checkpointing recomputes the same layers" in conflict_among(choices, workload_of(Stacked()), LONG)


def test_a_replaced_forward_is_refused():
    model = Mixed()
    model.layers["lstm"].forward = lambda *inputs: None
    with (
        pytest.raises(InputError, match="the forward of LSTM was replaced; leave time_segments=4 out"),
        installed(workload_of(model), [time_segments_choice(4)]),
    ):
        pass


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    num_layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    projects=st.booleans(),
    batch_first=st.booleans(),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    is_packed=st.booleans(),
    steps=st.integers(1, 14),
    kept=st.integers(0, 3),
)
def test_gradients_of_layers_of_all_shapes(
    kind, num_layers, bidirectional, projects, batch_first, lengths, is_packed, steps, kept
):
    torch.manual_seed(0)
    more = {"proj_size": 2} if projects and kind is nn.LSTM else {}
    layer = kind(3, 4, num_layers, bidirectional=bidirectional, batch_first=batch_first, **more).double()
    num_samples, num_steps = len(lengths), max(lengths)
    shape = (num_samples, num_steps, 3) if batch_first else (num_steps, num_samples, 3)
    inputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def gradients():
        given_ = inputs
        if is_packed:
            given_ = pack_padded_sequence(inputs, torch.tensor(lengths), batch_first, enforce_sorted=False)
        output, state = layer(given_)
        values = output.data if is_packed else output
        parts = state if isinstance(state, tuple) else (state,)
        weights = torch.linspace(0.5, 2, values.numel(), dtype=torch.float64)
        loss = (values.sin().flatten() * weights).sum() + sum(part.square().sum() for part in parts)
        return [loss.detach(), *torch.autograd.grad(loss, [inputs, *layer.parameters()])]

    wanted = gradients()
    with installed(workload_of(nn.Sequential(layer)), [time_segments_choice(steps, kept)]):
        found = gradients()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, input, state):
        if state is None:
            state = torch.zeros_like(input)
        state += self.linear(input)  # in place
        return state.tanh(), state


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(1, 8)

    def forward(self, input, state):
        self.hidden = 0.5 * self.hidden + input
        return self.hidden, self.hidden


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            InPlace,
            r"in place \(test_techniques_time_segments\.py, line \d+: state \+= self.linear\(input\)  # in place\)",
        ),
        (
            Attribute,
            r"Attribute keeps a state in its attribute `hidden` \(test_techniques_time_segments\.py, line \d+\)",
        ),
    ],
)
def test_a_cell_that_keeps_its_state_elsewhere_is_refused_with_the_line(cell, message):
    layer = UnrolledCell(cell())
    model = nn.Sequential(layer)
    choices = [time_segments_choice(2)]
    with (
        installed(workload_of(nn.Sequential(layer, nn.Linear(1, 1))), choices),
        pytest.raises(InputError, match=message),
    ):
        model(torch.randn(7, 1, 8))


class Decoder(nn.Module):
    """A model that adds to each step a summary of the whole sequence by an encoder."""

    def __init__(self, hands_on):
        super().__init__()
        self.encoder, self.recurrent = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)
        self.hands_on = hands_on

    def forward(self, x):
        summary = self.encoder(x.mean(1))
        return self.recurrent(x + summary[:, None])[0].square().sum()

    def in_segments(self, unroll, x):
        summary = self.encoder(x.mean(1))
        outside = () if self.hands_on else (summary,)

        def run(state, x_BS):
            *hidden, summary = (*state, *outside)
            states, last = self.recurrent(x_BS + summary[:, None], hidden[0] if hidden else None)
            return Passed(sums=(states.square().sum(),), state=(last, *([summary] if self.hands_on else [])))

        first = (torch.zeros(1, len(x), 4, dtype=x.dtype), summary) if self.hands_on else ()
        return unroll(run, (x,), first).sums[0]


@pytest.mark.parametrize("choice", [time_segments_choice(4), time_segments_choice(2, kept=1)])
def test_what_a_segment_uses_from_outside_is_refused_and_right_as_a_part_of_the_state(choice):
    torch.manual_seed(0)
    inputs = torch.randn(2, 11, 4, dtype=torch.float64)
    model = Decoder(hands_on=True).double()
    wanted = torch.autograd.grad(model(inputs), list(model.parameters()))
    with installed(workload_of(model), [choice]):
        found = torch.autograd.grad(model(inputs), list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    model.hands_on = False
    with installed(workload_of(model), [choice]):
        loss = model(inputs)
        with pytest.raises(InputError, match=r"that `\w+` computed before .*: give it to `unroll` as one of the"):
            loss.backward()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, input, state):
        (hidden,) = (torch.zeros_like(input),) if state is None else state
        hidden = torch.tanh(self.linear(nn.functional.dropout(hidden + input, 0.5, training=True)))
        return hidden, (hidden,)


def test_what_draws_in_evaluation_mode_draws_the_same_again():
    """The gradient equals finite differences with the same seed, that is, with the same masks."""
    torch.manual_seed(0)
    layer = UnrolledCell(Dropping()).double().eval()
    inputs = torch.randn(9, 2, 8, dtype=torch.float64)

    def loss():
        torch.manual_seed(5)
        return layer(inputs)[0].square().sum()

    with installed(workload_of(nn.Sequential(layer)), [time_segments_choice(2)]):
        (gradient,) = torch.autograd.grad(loss(), layer.cell.linear.weight)
        direction = torch.randn_like(gradient)
        with torch.no_grad():
            layer.cell.linear.weight += 1e-6 * direction
            above = loss()
            layer.cell.linear.weight -= 2e-6 * direction
            below = loss()
    torch.testing.assert_close((gradient * direction).sum(), (above - below) / 2e-6, rtol=1e-6, atol=1e-8)


# -- what is kept ------------------------------------------------------------------------------------------------------


def peak_bytes(num_steps, choices, lowering=None):
    model = build_recurrent(FIELDS | {"hidden_size": 64, "embedding_size": 64})
    return live_bytes(dry_run(model, batch(num_steps), choices, lowering)).peak_bytes


@pytest.mark.long
def test_what_is_kept_grows_with_the_square_root():
    """16 times the steps save about 16 times as much, but in segments of the square root about four times."""
    few, many = (peak_bytes(steps, [time_segments_choice(isqrt(steps))]) for steps in (256, 4096))
    plain_few, plain_many = (peak_bytes(steps, []) for steps in (256, 4096))
    least_bytes = peak_bytes(16, [time_segments_choice(0)])  # parameters, gradients and the like
    assert (plain_many - least_bytes) / (plain_few - least_bytes) > 12
    assert (many - least_bytes) / (few - least_bytes) < 6
    assert many < 0.1 * plain_many


@pytest.mark.long
def test_fewer_states_are_less_memory():
    least_bytes = peak_bytes(16, [time_segments_choice(0)])  # parameters, gradients and the like
    kept, fewer = (peak_bytes(512, [choice]) for choice in (time_segments_choice(8), time_segments_choice(8, kept=4)))
    assert fewer - least_bytes < 0.5 * (kept - least_bytes)


def test_on_cuda_too():
    """cuDNN's layers hold the reserve of one segment at a time."""
    lowering = CudaLowering((8, 6))
    plain, segmented = (peak_bytes(1024, choices, lowering) for choices in ([], [time_segments_choice(64)]))
    assert segmented < 0.4 * plain  # both have cuDNN's workspaces, whose size depends on the layers only


@pytest.mark.long
@pytest.mark.parametrize(
    ("choice", "num_steps", "num_samples"),
    [
        (time_segments_choice(0), 97, 1),
        pytest.param(time_segments_choice(0), 100, 4, marks=pytest.mark.long),
        (time_segments_choice(16, kept=2), 100, 4),
        pytest.param(time_segments_choice(16, kept=2), 97, 1, marks=pytest.mark.long),
    ],
)
def test_a_dry_run_allocates_what_a_run_does(choice, num_steps, num_samples):
    """This also holds if the last segment has a single token, for which torch treats the gradient as coalesced."""
    model = build_recurrent(FIELDS | {"architecture": "gru"})
    predicted = live_bytes(dry_run(model, batch(num_steps, num_samples), [choice])).peak_bytes
    assert live_bytes(recorded(model, batch(num_steps, num_samples), [choice])).peak_bytes == predicted


@pytest.mark.parametrize("layers", [nn.LSTM(8, 8, 2), nn.GRU(8, 8, 1, bidirectional=True)])
def test_weights_that_layers_and_directions_share_get_their_gradient_once(layers):
    inputs = torch.randn(23, 2, 8, dtype=torch.float64)
    layers = layers.double()
    other = "_l1" if layers.num_layers > 1 else "_l0_reverse"
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(layers, name + other, getattr(layers, name + "_l0"))
    plain = torch.autograd.grad(layers(inputs)[0].square().sum(), [*layers.parameters()])
    with installed(workload_of(nn.Sequential(layers)), [time_segments_choice(5)]):
        found = torch.autograd.grad(layers(inputs)[0].square().sum(), [*layers.parameters()])
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
