"""Packed sequences in stretches against the layers of torch: outputs, states, gradients, memory and choices."""

import copy
import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.backends import mkldnn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from traced_steps import dry_run, recorded

from layer_runs import HIDDEN, INPUTS, LAYERS, TOLERANCES, everything, parts_of, require_alike, tensors
from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice
from plimsoll.techniques import Setting, conflict_among, installed
from plimsoll.techniques.packed_stretches import PackedStretches, StretchedLayer
from plimsoll.techniques.time_segments import time_segments_choice
from technique_models import fresh

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

STRETCHES = Choice(technique="packed_stretches")
FIELDS = {"vocab_size": 30, "embedding_size": 8, "hidden_size": 8, "num_layers": 2, "num_labels": 3}
MODELS = {
    "classifier": lambda: build_recurrent(FIELDS | {"architecture": "gru"}),
    "bidirectional classifier": lambda: build_recurrent(FIELDS | {"architecture": "rnn", "bidirectional": True}),
    "tagger": lambda: build_recurrent(FIELDS | {"is_tagger": True, "architecture": "lstm", "bidirectional": True}),
}
VARYING = Setting("cpu", 4, lengths_vary=True)


def twins(name, dtype=torch.float64, **options):
    """Return a layer, and its copy that runs in stretches."""
    torch.manual_seed(0)
    plain = LAYERS[name](INPUTS, HIDDEN, **options).to(dtype)
    stretched = copy.deepcopy(plain)
    stretched.forward = StretchedLayer(stretched)
    return plain, stretched


def workload_of(model, units="samples"):
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, units)


def batch_of(name, lengths=(3, 11, 7, 7)):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 30, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    labels = (ids % 3).masked_fill(mask == 0, -100) if name == "tagger" else torch.arange(len(lengths)) % 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# -- the mathematics ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("name", "num_layers", "bidirectional"), list(product(LAYERS, (1, 2), (False, True))))
def test_outputs_states_and_gradients_are_those_of_the_layer(name, num_layers, bidirectional, dtype):
    projections = (0, 4) if name == "lstm" else (0,)
    lengths = torch.tensor([13, 4, 9, 9, 1])
    for batch_first, bias, has_state, proj_size in product((False, True), (True, False), (False, True), projections):
        options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
        plain, stretched = twins(name, dtype, **options, **({"proj_size": proj_size} if proj_size else {}))
        inputs = tensors((5, 13, INPUTS) if batch_first else (13, 5, INPUTS), dtype, 1)
        expected = everything(plain, inputs, lengths, has_state, dtype)
        require_alike(everything(stretched, inputs, lengths, has_state, dtype), expected, dtype)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(LAYERS)),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7),
    num_layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    has_state=st.booleans(),
    is_sorted=st.booleans(),
)
def test_any_lengths(name, lengths, num_layers, bidirectional, has_state, is_sorted):
    plain, stretched = twins(name, bidirectional=bidirectional, num_layers=num_layers)
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    inputs = tensors((max(lengths), len(lengths), INPUTS), torch.float64, 2)
    options = {"lengths": torch.tensor(lengths), "has_state": has_state, "is_sorted": is_sorted}
    require_alike(everything(stretched, inputs, **options), everything(plain, inputs, **options))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_draws_between_layers_and_only_in_training(bidirectional):
    """All outputs of the first layer are dropped, so the second layer computes its result for zeros."""
    plain, stretched = twins("gru", num_layers=2, dropout=1.0, bidirectional=bidirectional)
    inputs, lengths = tensors((13, 4, INPUTS), torch.float64, 1), torch.tensor([13, 9, 5, 5])
    require_alike(everything(stretched, inputs, lengths), everything(plain, inputs, lengths))
    require_alike(everything(stretched.eval(), inputs, lengths), everything(plain.eval(), inputs, lengths))


def test_dropout_drops_its_share_of_what_the_first_layer_gives():
    """The first layer returns ones and the second adds them up, so the outputs count the values that were kept."""
    torch.manual_seed(0)
    layer = nn.RNN(1, 400, num_layers=2, nonlinearity="relu", dropout=0.25).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.bias_ih_l0.fill_(1.0)
        layer.weight_ih_l1.fill_(1.0)
    packed = pack_padded_sequence(torch.zeros(9, 3, 1).double(), torch.tensor([9, 6, 2]))
    sums = StretchedLayer(layer)(packed)[0].data.detach()
    kept_NH = sums * 0.75  # dropout divides the kept values by the share that it keeps
    assert len(kept_NH[:, 0].unique()) > 1
    torch.testing.assert_close(kept_NH, kept_NH.round())
    assert float(kept_NH.mean()) == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast(name):
    plain, stretched = twins(name, torch.float32, num_layers=2, bidirectional=True)
    inputs, lengths = tensors((13, 4, INPUTS), torch.float32, 1), torch.tensor([13, 9, 5, 5])
    with torch.autocast("cpu", torch.bfloat16):
        expected = everything(plain, inputs, lengths, dtype=torch.float32)
        found = everything(stretched, inputs, lengths, dtype=torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float(((one.float() - other.float()).norm() / other.float().norm()).detach()) < 0.03


def test_weights_are_those_of_now():
    """Current weights include parametrized ones, and weights set by `functional_call`. Hooks see a gradient once."""
    plain, stretched = twins("lstm")
    inputs, lengths = tensors((7, 3, INPUTS), torch.float64, 1), torch.tensor([7, 4, 2])
    seen = []
    stretched.bias_ih_l0.register_hook(seen.append)
    plain.weight_ih_l0.requires_grad_(False)
    stretched.weight_ih_l0.requires_grad_(False)
    for layer in (plain, stretched):
        torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
        packed = pack_padded_sequence(inputs, lengths)
        layer(packed)[0].data.sum().backward()
    for one, other in zip(stretched.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=1e-10)
    assert len(seen) == 1
    _, other = twins("lstm")
    zeros = {name: torch.zeros_like(parameter) for name, parameter in other.named_parameters()}
    assert not torch.func.functional_call(other, zeros, (packed,))[0].data.any()


def test_a_copy_of_a_model_has_its_own_layer():
    _, stretched = twins("lstm")
    other = copy.deepcopy(stretched)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    packed = pack_padded_sequence(torch.ones(7, 2, INPUTS).double(), torch.tensor([7, 3]))
    assert not other(packed)[0].data.any()
    assert stretched(packed)[0].data.any()


def test_a_wrong_first_state_is_refused_as_torch_does():
    plain, stretched = twins("gru")
    packed = pack_padded_sequence(torch.ones(7, 2, INPUTS).double(), torch.tensor([7, 3]))
    wrong = torch.zeros(1, 3, HIDDEN).double()
    with pytest.raises(RuntimeError) as expected:
        plain(packed, wrong)
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
        stretched(packed, wrong)


# -- which kernels -----------------------------------------------------------------------------------------------------


class Names(TorchDispatchMode):
    """A mode that records the names of the called ops."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("bidirectional", "calls"), [(False, 1), (True, 4)])
def test_there_is_a_call_for_each_length(bidirectional, calls, monkeypatch):
    """A bidirectional layer has such calls for each layer and direction."""
    shapes, together = [], StretchedLayer._together

    def noted(layer, part, *rest):
        shapes.append(tuple(part.data.shape[:2]))
        return together(layer, part, *rest)

    monkeypatch.setattr(StretchedLayer, "_together", noted)
    _, stretched = twins("lstm", torch.float32, num_layers=2, bidirectional=bidirectional)
    stretched(pack_padded_sequence(torch.ones(9, 4, INPUTS), torch.tensor([9, 6, 6, 2])))
    assert sorted(shapes) == sorted([(2, 4), (4, 3), (3, 1)] * calls)


def test_onednn_which_keeps_code_for_each_shape_is_left_out_and_on_again():
    _, stretched = twins("lstm", torch.float32)
    packed, was_enabled = pack_padded_sequence(torch.ones(9, 2, INPUTS), torch.tensor([9, 6])), mkldnn.enabled
    with Names() as names:
        stretched(packed)
    assert "addmm" in names.found
    assert not any(name.startswith("mkldnn") for name in names.found)
    assert mkldnn.enabled == was_enabled
    with pytest.raises(RuntimeError):
        stretched(packed, (torch.zeros(1, 2, HIDDEN).double(),) * 2)  # of another type than the weights
    assert mkldnn.enabled == was_enabled


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_of_one_length_or_not_packed_is_torchs_own(name):
    plain, stretched = twins(name, torch.float32, num_layers=2, dropout=0.5)
    for given_inputs in (
        pack_padded_sequence(torch.ones(9, 4, INPUTS), torch.tensor([9, 9, 9, 9])),
        torch.ones(9, 4, INPUTS),
        torch.ones(9, INPUTS),
    ):
        found = []
        for layer in (plain, stretched):
            torch.manual_seed(4)
            outputs, last = layer(given_inputs)
            found.append([getattr(outputs, "data", outputs), *parts_of(last)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # with the same masks


# -- the memory of a dry run -----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_of_full_samples_equals_the_one_without_the_technique(name):
    batch = batch_of(name, (11, 11, 11, 11))
    torch.manual_seed(0)
    model = MODELS[name]()
    without, found = (dry_run(model, batch, choices) for choices in ((), (STRETCHES,)))
    assert (found.ops, found.storages, found.events) == (without.ops, without.storages, without.events)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_of_given_lengths_needs_what_a_run_needs(name):
    torch.manual_seed(0)
    model, batch = MODELS[name](), batch_of(name)
    predicted = live_bytes(dry_run(model, batch, [STRETCHES])).peak_bytes
    measured = live_bytes(recorded(model, batch, [STRETCHES])).peak_bytes
    assert predicted == measured


# -- with a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [(STRETCHES,), (STRETCHES, time_segments_choice(4))], ids=["alone", "segments"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_of_a_model_are_those_without(name, choices):
    torch.manual_seed(0)
    plain = MODELS[name]().double()
    other = copy.deepcopy(plain)
    model_loss(plain, batch_of(name)).backward()
    with installed(workload_of(other), choices):
        assert "forward" in vars(other.recurrent)
        model_loss(other, batch_of(name)).backward()
    assert not any("forward" in vars(part) for part in other.modules())
    for one, expected in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_a_layer_that_is_in_segments_stays_so_and_one_of_a_model_in_segments_is_in_stretches():
    segments = time_segments_choice(4)
    tagger, classifier = MODELS["tagger"](), MODELS["classifier"]()
    with (
        installed(workload_of(tagger), (segments, STRETCHES)),
        installed(workload_of(classifier), (segments, STRETCHES)),
    ):
        assert not isinstance(vars(tagger.recurrent)["forward"], StretchedLayer)
        assert isinstance(vars(classifier.recurrent)["forward"], StretchedLayer)
    assert not any("forward" in vars(part) for model in (tagger, classifier) for part in model.modules())


# -- what is offered ---------------------------------------------------------------------------------------------------


class Packs(nn.Module):
    packs_sequences = True

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 4)


@pytest.mark.parametrize("build", [*MODELS.values(), Packs], ids=[*MODELS, "own"])
def test_it_is_offered_to_models_that_say_that_they_pack(build):
    assert PackedStretches().choices(workload_of(build()), VARYING) == (STRETCHES,)


@pytest.mark.parametrize(
    ("build", "setting", "reason"),
    [
        (Packs, Setting("cuda", 4, lengths_vary=True), "cuDNN is fast on packed sequences"),
        (Packs, Setting("cpu", 4), "no attention_mask shows that the samples of a batch have different lengths"),
        (
            lambda: build_recurrent(FIELDS | {"is_tagger": True, "architecture": "lstm"}),
            VARYING,
            "set `packs_sequences = True`",
        ),
        (
            lambda: build_recurrent(FIELDS | {"architecture": "lstm", "num_labels": None}),
            VARYING,
            "it is unknown whether RecurrentLanguageModel packs sequences",
        ),
        (lambda: fresh("gpt2")[0], VARYING, "has no recurrent layers of torch"),
    ],
)
def test_where_it_is_not_it_says_why(build, setting, reason):
    assert reason in PackedStretches().choices(workload_of(build()), setting)


def test_by_name_any_recurrent_layer_takes_it():
    model = build_recurrent(FIELDS | {"is_tagger": True, "architecture": "lstm"})
    assert conflict_among((STRETCHES,), workload_of(model), Setting("cpu", 4)) is None
    with installed(workload_of(model), (STRETCHES,)):
        assert isinstance(vars(model.recurrent)["forward"], StretchedLayer)


def test_what_has_no_recurrent_layer_or_is_compiled_is_refused():
    linear = nn.Linear(2, 2)
    assert "Linear has no recurrent layers" in conflict_among((STRETCHES,), workload_of(linear), VARYING)
    refused = pytest.raises(InputError, match="Linear has no recurrent layers.*; leave it out")
    with refused, installed(workload_of(linear), (STRETCHES,)):
        raise AssertionError("it was installed")
    compiled = torch.compile(MODELS["tagger"](), backend="eager")
    assert "the model is compiled" in conflict_among((STRETCHES,), workload_of(compiled), VARYING)


def test_an_option_is_refused():
    choice = Choice(technique="packed_stretches", options={"steps": 3})
    assert "its options are steps: it has none" in conflict_among((choice,), workload_of(MODELS["tagger"]()), VARYING)
