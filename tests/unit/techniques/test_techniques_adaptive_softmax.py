"""An adaptive softmax for the run: the trained and saved weights, refused models, and restoration."""

import pytest
import torch
from torch import nn

from plimsoll.models.recurrent.model import build_recurrent, load_recurrent, save_recurrent
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.search.pins import decide
from plimsoll.records.plan import Choice, micro_batch_choice, parse_pin
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.adaptive_softmax import AdaptiveSoftmax
from plimsoll.techniques.chunked_loss import ChunkedLoss

WORDS = 1100
AUTO = Choice(technique="adaptive_softmax", options={"cutoffs": "auto", "div_value": 4})
ALLOWED = Setting(device="cpu", batch_size=8, allow=frozenset({"adaptive_softmax"}))


def made(**fields):
    torch.manual_seed(0)
    sizes = {"architecture": "gru", "vocab_size": WORDS, "embedding_size": 16, "hidden_size": 16}
    model = build_recurrent(sizes | fields).train()
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-2), model_loss, "next-tokens")


def batch_of(num_samples=8):
    ids = torch.randint(0, WORDS, (num_samples, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def test_it_must_be_allowed_by_name():
    reason = AdaptiveSoftmax().conflicts(AUTO, (), made(), Setting(device="cpu", batch_size=8))
    assert reason == "it is lossy: allow it with `allow: [adaptive_softmax]`"


def test_chunked_loss_does_not_go_with_it_nor_after_it():
    workload, chunks = made(), Choice(technique="chunked_loss", options={"chunk_tokens": 64})
    assert "the output layer that it replaces" in AdaptiveSoftmax().conflicts(AUTO, (chunks,), workload, ALLOWED)
    with installed(workload, [AUTO]):
        assert "never computes all logits" in ChunkedLoss().choices(workload, ALLOWED)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (made(num_labels=2), "a RecurrentClassifier is not a recurrent language model of Plimsoll"),
        (made(tie_weights=True), "shares the embedding's weights (tie_weights)"),
        (made(adaptive_cutoffs=(100,)), "the model has an adaptive softmax"),
        (made(vocab_size=1023), "a vocabulary of 1023 words is small"),
    ],
    ids=["classifier", "tied", "adaptive", "small"],
)
def test_where_there_is_nothing_for_it_it_says_why(workload, reason):
    assert reason in AdaptiveSoftmax().choices(workload, ALLOWED)
    assert reason in AdaptiveSoftmax().conflicts(AUTO, (), workload, ALLOWED)


def test_an_output_layer_that_is_frozen_or_watched_stays():
    frozen, watched = made(), made()
    frozen.model.head.weight.requires_grad_(False)
    watched.model.head.register_forward_hook(lambda *_: None)
    assert "the output layer is frozen" in AdaptiveSoftmax().choices(frozen, ALLOWED)
    assert "the output layer has hooks" in AdaptiveSoftmax().choices(watched, ALLOWED)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cutoffs": "many"}, "cutoffs are many: give numbers of words such as 2000,10000, or auto"),
        ({"cutoffs": "100,50"}, "cutoffs are 100, 50: give one or more"),
        ({"cutoffs": "2000"}, "cutoffs are 2000, but the vocabulary has 1100 words"),
        ({"cutoffs": "10,20", "div_value": 5}, "2 clusters with 5 times fewer features"),
        ({"cutoffs": "10", "div_value": 0}, "div_value is 0"),
        ({"cutoffs": "10", "div_value": True}, "div_value is True"),
    ],
)
def test_clusters_that_are_none_are_refused(options, reason):
    found = AdaptiveSoftmax().conflicts(Choice(technique="adaptive_softmax", options=options), (), made(), ALLOWED)
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("pin", "cutoffs"),
    [
        ("adaptive_softmax", (44, 220)),
        ("adaptive_softmax=50,300", (50, 300)),
        ("adaptive_softmax=50", (50,)),
        ("adaptive_softmax(cutoffs=50,300,div_value=2)", (50, 300)),
        ("adaptive_softmax(div_value=8)", (44,)),  # 16 features have no eighth of an eighth
    ],
)
def test_clusters_follow_from_the_vocabulary_or_are_pinned(pin, cutoffs):
    workload = made()
    decided = decide([parse_pin(pin)], (), workload, ALLOWED)
    choice = decided.pinned[0] if decided.pinned else AUTO
    with installed(workload, [choice]):
        assert workload.model.config.adaptive_cutoffs == cutoffs
        assert workload.model.head.cutoffs == [*cutoffs, WORDS]


def test_the_new_layer_has_the_frequent_words_and_is_trained():
    workload = made()
    given = workload.model.head
    weight, bias = given.weight.detach().clone(), given.bias.detach().clone()
    with installed(workload, [AUTO]):
        new = workload.model.head
        assert torch.equal(new.head.weight[:44], weight[:44])
        assert torch.equal(new.head.bias[:44], bias[:44])
        trained = [one for group in workload.optimizer.param_groups for one in group["params"]]
        assert {id(one) for one in trained} == {id(one) for one in workload.model.parameters()}
        before = [one.detach().clone() for one in trained]
        step = TrainStep(workload.model, workload.optimizer, units="next-tokens", micro_batch=4, clip_norm=1.0)
        step(batch_of())
        step(batch_of())
        assert not any(torch.equal(one, old) for one, old in zip(trained, before, strict=True))
    assert workload.model.head is given
    assert torch.equal(given.weight, weight)
    assert torch.equal(given.bias, bias)


def test_what_stays_keeps_its_states_and_groups():
    workload = made()
    model = workload.model
    others = [*model.embedding.parameters(), *model.recurrent.parameters()]
    groups = [{"params": others, "lr": 0.1}, {"params": list(model.head.parameters())}]
    workload.optimizer = optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    model_loss(model, batch_of()).backward()
    optimizer.step()
    optimizer.zero_grad()
    states = {parameter: state["momentum_buffer"] for parameter, state in optimizer.state.items()}
    with installed(workload, [AUTO]):
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len(others),
            len([*model.head.parameters()]),
        ]
        assert set(optimizer.state) == set(others)
        model_loss(model, batch_of()).backward()
        optimizer.step()
    assert list(optimizer.state) == list(states)
    assert all(optimizer.state[parameter]["momentum_buffer"] is state for parameter, state in states.items())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_an_error_on_the_way_in_leaves_the_model_as_it_was():
    workload = made()
    before = list(workload.model.named_modules())
    wrong = Choice(technique="adaptive_softmax", options={"cutoffs": "2000", "div_value": 4})
    with pytest.raises(ValueError), installed(workload, [wrong]):
        raise AssertionError
    assert list(workload.model.named_modules()) == before
    assert workload.model.config.adaptive_cutoffs is None


def test_what_is_saved_meanwhile_is_loaded_as_it_then_is(tmp_path):
    workload = made()
    with installed(workload, [AUTO]):
        save_recurrent(workload.model, tmp_path)
        trained = model_loss(workload.model, batch_of())
    loaded = load_recurrent(tmp_path)
    assert isinstance(loaded.head, nn.AdaptiveLogSoftmaxWithLoss)
    assert torch.equal(model_loss(loaded, batch_of()), trained)


def test_the_loss_does_not_depend_on_the_cut():
    """This includes a micro-batch without rare words, and a sample without labels."""
    batch = batch_of()
    batch["input_ids"][:2] %= 40
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][3, 1:] = -100

    def losses(samples):
        workload = made()
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.5)
        fallback = [micro_batch_choice(samples), AUTO]
        step = TrainStep(workload.model, optimizer, units="next-tokens", fallbacks=[fallback], clip_norm=None)
        found = [step(batch).loss for _ in range(3)]
        step.close()
        return found

    assert losses(1) == pytest.approx(losses(8), rel=1e-5)
