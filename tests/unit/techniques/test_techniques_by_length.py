"""Loss and gradients of a batch cut by length equal the results of the padded batch."""

import pytest
import torch
from tests.tally import in_a_check
from torch import nn

import workloads
from plimsoll.data.batch import count_elements
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.models.hooks import BY_SAMPLES, StepHooks
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.micro_batches import shape_of, weighted_micro_batches
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.by_length import ByLength
from plimsoll.techniques.mechanisms.lengths import CutByLength

LENGTHS = [12, 3, 7, 12, 1, 9, 4, 2]
VARYING = Setting(device="cpu", batch_size=8, lengths_vary=True)
BY_LENGTH = Choice(technique="by_length")


def padded(kind):
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(1, workloads.VOCABULARY, (8, 12), generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100) if kind == "tokens" else torch.arange(8) % 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classifier():
    return build_recurrent(
        {"architecture": "gru", "vocab_size": 50, "num_labels": 3, "embedding_size": 8, "hidden_size": 8}
    )


def language_model():
    return build_recurrent({"architecture": "lstm", "vocab_size": 50, "embedding_size": 8, "hidden_size": 8})


CASES = {
    "bert": (lambda: workloads.bert(dropout=0.0), "samples"),
    "gpt2": (lambda: workloads.gpt2(dropout=0.0), "next-tokens"),
    "gru classifier": (classifier, "samples"),
    "lstm": (language_model, "next-tokens"),
}


def made(name):
    build, units = CASES[name]
    torch.manual_seed(0)
    model = build().train()
    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=1.0), model_loss, units)
    return workload, padded("samples" if units == "samples" else "tokens")


def cut(units="samples", full_length=None):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Workload(model, optimizer, model_loss, units, hooks=StepHooks(cut=CutByLength(full_length)))


def loss_and_gradients(workload, batch, micro_batch):
    workload.model.zero_grad()
    shape = shape_of(batch, workload)
    total = 0.0
    for one, share, _ in weighted_micro_batches(batch, micro_batch, shape, workload):
        loss = workload.loss(workload.model, one) * share
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in workload.model.named_parameters()}


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_padded_batch(name, micro_batch):
    workload, batch = made(name)
    plain_loss, plain = loss_and_gradients(workload, batch, 8)
    with installed(workload, [BY_LENGTH]):
        loss, gradients = loss_and_gradients(workload, batch, micro_batch)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert workloads.largest_relative_difference(plain, gradients) < 1e-5
    assert workload.hooks.cut is BY_SAMPLES


def test_trimming_what_is_padding_for_all_leaves_the_loss_and_takes_fewer_columns():
    workload, batch = made("bert")
    short = {name: value[[1, 4, 6, 7]] for name, value in batch.items()}
    (one, share, _), *rest = weighted_micro_batches(short, 4, shape_of(short, cut()), cut())
    assert not rest
    assert share == 1.0
    assert one["input_ids"].shape == (4, 4)
    with torch.no_grad():
        assert torch.equal(model_loss(workload.model, one), model_loss(workload.model, short))


@pytest.mark.parametrize("units", ["samples", "tokens", "next-tokens", lambda batch: batch["input_ids"].numel()])
def test_every_sample_is_there_once_and_the_shares_add_up(units):
    batch = padded("tokens") | {"number": torch.arange(8)}
    micro_batches = list(weighted_micro_batches(batch, 3, shape_of(batch, cut(units)), cut(units)))
    seen = torch.cat([one["number"] for one, _, _ in micro_batches]).tolist()
    assert seen == [number for _, _, numbers in micro_batches for number in numbers]
    assert seen == [0, 3, 5, 2, 6, 1, 7, 4][: len(seen)]
    assert len(seen) == 8 - (units == "next-tokens")  # a sample of one token predicts nothing; alone it is left out
    assert sum(share for _, share, _ in micro_batches) == pytest.approx(1)
    assert [len(one["number"]) for one, _, _ in micro_batches] == [3, 4, 1][: len(micro_batches)]
    assert all(count_elements(one) <= 3 * count_elements(batch) / 8 for one, _, _ in micro_batches)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_batch_of_short_samples_goes_in_as_few_passes_as_have_the_elements_of_full_ones(micro_batch):
    short = {name: value[[1, 4, 7, 1]] for name, value in padded("samples").items()}  # of 3, 1, 2 and 3 tokens
    short = {name: value[:, :4] if value.dim() == 2 else value for name, value in short.items()}
    workload = cut(full_length=48)
    shape = shape_of(short, workload)
    assert (
        shape.elements_per_sample == 2 * 48 + 1
    )  # as the fallback schedule counts every batch: a limit holds for all of them
    micro_batches = [one for one, _, _ in weighted_micro_batches(short, micro_batch, shape, workload)]
    assert [tuple(one["input_ids"].shape) for one in micro_batches] == [(4, 3)]
    assert len(list(weighted_micro_batches(short, micro_batch, shape_of(short, cut()), cut()))) == 4 // micro_batch
    long = padded("samples")
    assert shape_of(long, cut(full_length=8)).elements_per_sample == 2 * 12 + 1  # longer than the declared full length


def test_a_training_step_and_an_evaluation_do_it():
    workload, batch = made("bert")
    step = TrainStep(workload.model, workload.optimizer, units="samples", micro_batch=3)
    seen = []

    def loss(model, one):
        if not in_a_check():
            seen.append(tuple(one["input_ids"].shape))
        return model_loss(model, one)

    step.workload.loss = loss
    with installed(step.workload, [BY_LENGTH]):
        step(batch)
        assert seen == [(3, 12), (4, 7), (1, 1)]
        seen.clear()
        step.evaluate([batch])  # in micro-batches of 8, 4, 2 or 1 samples
    assert seen == [(2, 12), (2, 9), (2, 4), (2, 2)]


def test_a_dry_run_knows_the_lengths_of_its_batch():
    from plimsoll.memory.trace import dry_run

    workload, batch = made("bert")
    widths = []
    for by_length in (False, True):
        with dry_run(CpuLowering(), lambda: "forward") as stage:
            model, optimizer = stage.fake_training(workload.model, workload.optimizer)
            hooks = StepHooks(cut=CutByLength() if by_length else BY_SAMPLES)
            fake = Workload(model, optimizer, model_loss, "samples", hooks=hooks)
            micro_batches = weighted_micro_batches(stage.fake_batch(batch), 3, shape_of(batch, fake), fake)
            widths.append([])
            for one, share, _ in micro_batches:
                (fake.loss(model, one) * share).backward()
                widths[-1].append(tuple(one["input_ids"].shape))
        assert live_bytes(stage.trace()).peak_bytes > 0
    assert widths == [[(3, 12), (3, 12), (2, 12)], [(3, 12), (4, 7), (1, 1)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)


def workload_of(model, **fields):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return Workload(model, optimizer, fields.pop("loss", model_loss), fields.pop("units", "samples"))


def fnet():
    from transformers import FNetConfig, FNetForSequenceClassification

    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    return FNetForSequenceClassification(FNetConfig(**sizes))


@pytest.mark.parametrize(
    ("workload", "setting", "reason"),
    [
        (
            lambda: made("bert")[0],
            Setting("cpu", 8),
            "no attention_mask shows that the samples of a batch have different",
        ),
        (lambda: workload_of(Net()), VARYING, "BatchNorm"),
        (lambda: workload_of(fnet()), VARYING, "padding changes the result of fnet: it mixes all positions"),
        (
            lambda: workload_of(nn.Linear(1, 1)),
            VARYING,
            "it is unknown whether Linear ignores padding on the right",
        ),
        (lambda: workload_of(classifier(), units=len), VARYING, "may count padding"),
        (lambda: workload_of(classifier(), loss=len), VARYING, "may count padding"),
    ],
)
def test_without_choices_the_reason_is_given(workload, setting, reason):
    assert reason in ByLength().choices(workload(), setting)


@pytest.mark.parametrize("name", CASES)
def test_there_is_a_choice_for_models_that_ignore_padding(name):
    assert ByLength().choices(made(name)[0], VARYING) == (BY_LENGTH,)


class Ignoring(nn.Module):
    ignores_padding = True


def test_a_model_can_say_itself_that_it_ignores_padding():
    assert ByLength().choices(workload_of(Ignoring()), VARYING) == (BY_LENGTH,)
    tagger = build_recurrent(
        {"is_tagger": True, "architecture": "lstm", "vocab_size": 9, "num_labels": 2, "bidirectional": True}
    )
    assert ByLength().choices(workload_of(tagger), VARYING) == (BY_LENGTH,)


def test_the_user_can_say_that_a_model_ignores_padding():
    allowed = Setting("cpu", 8, lengths_vary=True, allow=frozenset({"by_length"}))
    assert ByLength().choices(workload_of(nn.Linear(1, 1)), allowed) == (BY_LENGTH,)
    assert "fnet" in ByLength().choices(workload_of(fnet()), allowed)


def test_a_pin_is_refused_only_where_it_is_known_to_be_wrong():
    others = (micro_batch_choice(2),)
    assert ByLength().conflicts(BY_LENGTH, others, workload_of(nn.Linear(1, 1)), VARYING) is None
    assert "fnet" in ByLength().conflicts(BY_LENGTH, others, workload_of(fnet()), VARYING)
