"""Scores of a tagger that repeats its input as its answer: entities by hand, windows, and batches that are split."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.step.failpoints import armed
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.training.tagging import TagScores, entities_of

NAMES = ("B-X", "I-X", "O")
B, I, O, _ = 0, 1, 2, -100  # noqa: E741 -- they are tags


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("O O", set()),
        ("B-X O B-Y", {("X", 0, 1), ("Y", 2, 3)}),
        ("B-X I-X O", {("X", 0, 2)}),
        ("B-X B-X I-X", {("X", 0, 1), ("X", 1, 3)}),
        ("I-X I-X O I-X", {("X", 0, 2), ("X", 3, 4)}),  # conlleval: an I outside an entity begins one
        ("B-X I-Y I-Y", {("X", 0, 1), ("Y", 1, 3)}),
        ("I-X I-Y", {("X", 0, 1), ("Y", 1, 2)}),
        ("I-Y I-X", {("Y", 0, 1), ("X", 1, 2)}),
        ("O O I-X", {("X", 2, 3)}),
        ("S-X I-X", {("X", 0, 1), ("X", 1, 2)}),
        ("", set()),
        ("B-X I-X E-X S-X O", {("X", 0, 3), ("X", 3, 4)}),
        ("E-X I-X B-X E-X", {("X", 0, 1), ("X", 1, 2), ("X", 2, 4)}),
        ("B-X-Y I-X-Y", {("X-Y", 0, 2)}),
    ],
)
def test_entities_are_those_of_conlleval(tags, entities):
    assert entities_of(tags.split()) == entities


class Parrot(nn.Module):
    """A model that answers with the tags that its input names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, answers, labels):
        logits = nn.functional.one_hot(answers, 3) * self.weight
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Windows:
    """Positions of samples: text 0 has samples 0 and 2, text 1 has sample 1, and text 2 has sample 3."""

    def parents(self, ids):
        return np.array([0, 1, 0, 2])[ids]

    def num_of_parents(self, parents):
        return np.array([2, 1, 1])[parents]


def evaluated(batches, windows=None, names=NAMES):
    model = Parrot()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), units="tokens")
    given = (
        ({"answers": torch.tensor(answers), "labels": torch.tensor(labels)}, np.array(ids))
        for answers, labels, ids in batches
    )
    with TagScores(model, step.position, names, windows) as scores:
        step.evaluate(scores.counted(given))
    assert not model._forward_hooks
    return scores.accuracy(), scores.entity_f1()


# Text 0 is B I I | I O, and its second window lacks one word. Text 1 is B O and text 2 is O O.
BATCHES = [
    ([[B, I, I], [O, O, B]], [[B, I, I], [B, O, _]], [0, 1]),
    ([[I, O, O], [O, I, O]], [[I, O, _], [O, O, _]], [2, 3]),
]


def test_words_and_entities_are_counted_once_and_entities_reach_over_windows():
    accuracy, f1 = evaluated(BATCHES, Windows())
    assert accuracy == 7 / 9
    assert f1 == 2 * 1 / (2 + 2)  # X in text 0 is found, X in text 1 is missed, and X in text 2 is wrong
    assert evaluated(BATCHES[::-1], Windows()) == (accuracy, f1)  # windows in any order
    _, apart = evaluated(BATCHES)
    assert apart == 2 * 2 / (3 + 3)  # each sample is a text: the entity in two windows counts twice


@pytest.mark.parametrize("calls", [(1,), (2,), (1, 3)])
def test_a_batch_that_was_cut_after_an_oom_counts_once(calls):
    with armed("evaluation", *calls):
        assert evaluated(BATCHES, Windows()) == (7 / 9, 0.5)


def test_without_entities_there_is_no_f1():
    assert evaluated(BATCHES, Windows(), ("NOUN", "VERB", "X"))[1] is None
    assert evaluated([([[O, O]], [[O, O]], [0])]) == (1.0, None)
    assert evaluated([([[O, B]], [[O, O]], [0])]) == (0.5, 0.0)  # the F1 score without entities


def test_what_is_no_word_is_not_judged_and_without_words_nothing_is_known():
    assert evaluated([([[B, I, O]], [[_, _, O]], [0])]) == (1.0, None)
    assert evaluated([([[B, I]], [[_, O]], [0]), ([[B, I]], [[B, _]], [1])]) == (0.5, 2 / 3)
    nothing = TagScores(Parrot(), Position(), NAMES, None)
    assert (nothing.accuracy(), nothing.entity_f1()) == (None, None)
