"""Truncated backpropagation through time equals the textbook loop, and is refused if it would not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from plimsoll.errors import InputError
from plimsoll.models.distillation.chunked import LossWeights
from plimsoll.models.distillation.loss import Distillation
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.recurrent.segments import Passed, as_hidden, as_state
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice
from plimsoll.techniques import Setting, conflict_among, installed
from plimsoll.techniques.truncated_bptt import TruncatedBptt

FIELDS = {"architecture": "lstm", "vocab_size": 30, "embedding_size": 8, "hidden_size": 8, "num_layers": 2}
ALLOWED = Setting("cpu", 4, allow=frozenset({"truncated_bptt"}), sequence_length=1000)


def workload_of(model, precision="fp32"):
    return Workload(model, torch.optim.SGD(model.parameters()), model_loss, "next-tokens", precision=precision)


def choice_of(steps):
    return Choice(technique="truncated_bptt", options={"steps": steps})


def textbook(model, ids, steps):
    """Return the loss of the textbook loop, which passes on the detached hidden state."""
    state, total = None, 0.0
    targets = functional.pad(ids[:, 1:], (0, 1), value=-100)
    for start in range(0, ids.shape[1], steps):
        hidden, state = model.recurrent(model.embedding(ids[:, start : start + steps]), state)
        state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
        logits = model.head(hidden).flatten(0, 1)
        total = total + functional.cross_entropy(logits, targets[:, start : start + steps].flatten(), reduction="sum")
    return total / (targets != -100).sum()


@pytest.mark.parametrize("architecture", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("steps", [1, 5, 23])
def test_it_is_the_textbooks_loop(architecture, steps):
    torch.manual_seed(0)
    model = build_recurrent(FIELDS | {"architecture": architecture}).double()
    other, ids = copy.deepcopy(model), torch.randint(0, 30, (4, 23))
    with installed(workload_of(model), [choice_of(steps)]):
        loss = model_loss(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    expected = textbook(other, ids, steps)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, wanted.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("architecture", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("steps", [1, 5, 23])
def test_it_is_bitwise_the_loop_that_adds_up_gradients_as_it_goes(architecture, steps):
    """The gradients of the summed loss of each segment are added in turn, and scaled at the end.

    One backward through the mean of all segments (`textbook`) adds the same numbers in another order, and thus rounds
    differently. So does the embedding here, to which each segment adds only the rows that it has read.
    """
    torch.manual_seed(0)
    model = build_recurrent(FIELDS | {"architecture": architecture})
    other, ids = copy.deepcopy(model), torch.randint(0, 30, (4, 23))
    with installed(workload_of(model), [choice_of(steps)]):
        loss = model_loss(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    targets = functional.pad(ids[:, 1:], (0, 1), value=-100)
    parameters, state, total, sums = list(other.parameters()), None, None, None
    for start in range(0, 23, steps):
        hidden, state = other.recurrent(other.embedding(ids[:, start : start + steps]), state)
        state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
        logits = other.head(hidden).flatten(0, 1)
        part = functional.cross_entropy(logits, targets[:, start : start + steps].flatten(), reduction="sum")
        found = torch.autograd.grad(part, parameters)
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        total = part.detach() if total is None else total + part.detach()
    num_targets = (targets != -100).sum()
    assert torch.equal(loss, total / num_targets)
    if steps < 23:  # one segment is plain training, which scales first
        for (name, one), wanted in zip(model.named_parameters(), sums, strict=True):
            if name == "embedding.weight":
                torch.testing.assert_close(one.grad, wanted / num_targets)
            else:
                assert torch.equal(one.grad, wanted * (1 / num_targets)), name


def test_nothing_is_computed_twice():
    model = build_recurrent(FIELDS)
    calls = []
    model.head.register_forward_hook(lambda *inputs: calls.append(1))
    ids = torch.randint(0, 30, (4, 20))
    with installed(workload_of(model), [choice_of(5)]):
        model_loss(model, {"input_ids": ids, "labels": ids}).backward()
    assert len(calls) == 4


def test_without_gradients_it_is_the_plain_loss():
    model = build_recurrent(FIELDS)
    ids = torch.randint(0, 30, (4, 20))
    plain = model(ids, labels=ids).loss
    with torch.no_grad(), installed(workload_of(model), [choice_of(5)]):
        torch.testing.assert_close(model_loss(model, {"input_ids": ids, "labels": ids}), plain.detach())


def test_a_teacher_judges_whole_sequences():
    workload = workload_of(build_recurrent(FIELDS))
    workload.loss = Distillation(build_recurrent(FIELDS), "language-modeling", LossWeights(2.0, 0.5))
    assert "a teacher is compared with" in str(TruncatedBptt().choices(workload, ALLOWED))


@pytest.mark.parametrize(
    ("choice", "setting", "precision", "reason"),
    [
        (choice_of(5), Setting("cpu", 4), "fp32", r"allow it with `allow: [truncated_bptt]`"),
        (choice_of(-1), ALLOWED, "fp32", "steps is -1: give a whole number, 0 for the default"),
        (choice_of(5), ALLOWED, "fp16", "use bf16"),
        (choice_of(2.5), ALLOWED, "fp32", "steps is 2.5: give a whole number"),
        (Choice(technique="truncated_bptt", options={}), ALLOWED, "fp32", "its options are none: give steps and"),
        (
            Choice(technique="truncated_bptt", options={"steps": 5, "kept": -1}),
            ALLOWED,
            "fp32",
            "its options are steps, kept: give steps and nothing else",
        ),
    ],
)
def test_what_cannot_be_is_refused(choice, setting, precision, reason):
    assert reason in conflict_among((choice,), workload_of(build_recurrent(FIELDS), precision), setting)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: nn.LSTM(2, 2), "LSTM does not define how to compute the loss of one segment"),
        (
            lambda: build_recurrent(FIELDS | {"num_labels": 2}),
            "is computed at the end of the sequence (judges_the_end)",
        ),
    ],
)
def test_a_model_without_a_loss_for_each_stretch_is_refused(model, reason):
    assert reason in TruncatedBptt().choices(workload_of(model()), ALLOWED)
    with pytest.raises(InputError, match="cannot truncate"), installed(workload_of(model()), [choice_of(5)]):
        pass


class Ending(nn.Module):
    """A user's model with one result for a sequence."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(3, 3, batch_first=True)

    def forward(self, x):
        return self.recurrent(x)[1].pow(2).mean()

    def in_segments(self, unroll, x):
        def run(state, x_BS):
            return Passed(state=as_state(self.recurrent(x_BS, as_hidden(state))[1]))

        return unroll(run, (x,)).state[0].pow(2).mean()


class Saying(Ending):
    judges_the_end = True


def test_a_model_of_ones_own_whose_loss_is_of_the_end_says_so():
    assert "the loss of Saying is computed at the end of the sequence" in TruncatedBptt().choices(
        workload_of(Saying()), ALLOWED
    )
    assert "the loss of Saying is computed at the end" in conflict_among(
        (choice_of(5),), workload_of(Saying()), ALLOWED
    )


def test_one_that_does_not_say_so_is_refused_in_its_first_step():
    model = Ending()
    with (
        installed(workload_of(model), [choice_of(5)]),
        pytest.raises(InputError, match=r"needs a model whose segments"),
    ):
        model(torch.ones(2, 20, 3))


def test_gradients_reach_back_to_the_beginning_of_a_segment():
    assert [TruncatedBptt().gradient_steps(choice_of(steps), 12) for steps in (5, 20)] == [5, 12]


def test_the_choices_are_those_of_time_segments():
    available = TruncatedBptt().choices(workload_of(build_recurrent(FIELDS)), ALLOWED)
    assert [choice.options["steps"] for choice in available] == [128, 32]
    assert TruncatedBptt().choices(workload_of(build_recurrent(FIELDS)), Setting("cpu", 4)) == (choice_of(0),)
    short = Setting("cpu", 4, sequence_length=20)
    assert "20 steps are too short" in TruncatedBptt().choices(workload_of(build_recurrent(FIELDS)), short)
