"""The front of a search: the models that no other model beats in both size and quality."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from plimsoll.records.shrink import HOW_TO_LOAD, Form, Quality, Small
from shrink_records import quality, shrunk


def test_the_front_has_the_smallest_and_whatever_is_better_than_all_smaller_ones():
    # Correct answers: 176 at 3 MiB, 179 at 5 MiB, 160 at 8 MiB, 180 at 16 MiB. Both smaller models beat the one of 8
    # MiB.
    assert shrunk().front == (3, 2, 0)


def test_of_two_of_one_size_the_better_is_on_the_front():
    def made(right):
        return Small(form="plain", file_bytes=10, weight_bytes=10, quality=quality(right, 0.5))

    assert shrunk(models=(made(100), made(120), made(110)), best=None).front == (1,)


def test_equal_scores_are_told_apart_by_the_loss():
    assert quality(150, 0.4).rank > quality(150, 0.5).rank
    assert Quality(loss=math.nan, num_samples=1).rank < Quality(loss=1e9, num_samples=1).rank


@pytest.mark.parametrize(
    ("fields", "score"),
    [({}, -2.0), ({"accuracy": 0.5}, 0.5), ({"accuracy": 0.9, "entity_f1": 0.3}, 0.3), ({"similarity": 0.7}, 0.7)],
)
def test_models_are_compared_by_what_their_task_is_judged_by(fields, score):
    assert Quality(loss=2.0, num_samples=1, **fields).score == score


def test_a_language_model_has_a_perplexity_and_others_have_none():
    assert Quality(loss=math.log(8), num_samples=1).perplexity == pytest.approx(8)
    assert quality(1, 0.5).perplexity is None


def test_what_was_trained_counts_after_the_training():
    assert shrunk().models[3].best_quality == quality(176, 0.3)
    assert shrunk().models[3].name == "layers=2 > int8"
    assert shrunk().original.name == "original"


def test_each_form_says_how_it_is_loaded():
    assert set(HOW_TO_LOAD) == set(get_args(Form))
