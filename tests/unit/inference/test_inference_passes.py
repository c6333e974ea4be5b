"""Passes over texts of unequal length: grouping, the order of results, and out-of-memory errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_folders import model_folder
from plimsoll.device.base import backend_for
from plimsoll.errors import OutOfMemoryError
from plimsoll.inference.passes import Batch, Passes, computed_to_the_end, free_id, padded
from plimsoll.models.inference import inference_task
from plimsoll.models.loading import load_model
from plimsoll.step.failpoints import armed, exhaust_memory


def texts(*lengths: int) -> list[list[int]]:
    """Return texts whose tokens identify them."""
    return [[number + 1] * length for number, length in enumerate(lengths)]


def first_tokens(batch: Batch, _: Sequence[int]) -> list[int]:
    return [int(row.max()) for row in batch["input_ids"]]


class Recorded:
    """A task that records the shapes of its batches, and may run out of memory."""

    def __init__(self, fails: Callable[[Tensor], bool] = lambda ids: False) -> None:
        self.shapes: list[tuple[int, int]] = []
        self._fails = fails

    def __call__(self, batch: Batch, places: Sequence[int]) -> list[int]:
        self.shapes.append(tuple(batch["input_ids"].shape))  # type: ignore[arg-type]
        if self._fails(batch["input_ids"]):
            exhaust_memory()
        assert len(places) == len(batch["input_ids"])
        return first_tokens(batch, places)


def passes(work: Any = first_tokens, tokens: int = 12, rows: int = 100, **fields: Any) -> Passes[int]:
    return Passes(work, backend_for("cpu"), torch.device("cpu"), 0, tokens, rows, **fields)


def test_results_are_in_the_order_of_the_texts() -> None:
    lengths = [random.Random(0).randrange(1, 30) for _ in range(200)]
    assert passes(tokens=64).run(texts(*lengths)) == list(range(1, 201))


def test_texts_of_alike_length_go_together_under_the_tokens_of_a_pass() -> None:
    work = Recorded()
    ran = passes(work)
    assert ran.run(texts(1, 6, 2, 5, 20, 3)) == [1, 2, 3, 4, 5, 6]
    # 20 exceeds 12 tokens and runs alone. Then 2 texts of 6 columns run. Then 4 of 3 columns would fit, and 3 are left.
    assert work.shapes == [(1, 20), (2, 6), (3, 3)]
    assert (ran.counts.num_passes, ran.counts.num_tokens, ran.counts.num_padded_tokens) == (3, 37, 41)


def test_a_pass_has_no_more_rows_than_allowed() -> None:
    work = Recorded()
    passes(work, tokens=100, rows=2).run(texts(1, 1, 1))
    assert work.shapes == [(2, 1), (1, 1)]


def test_texts_of_one_token_or_of_none_go_as_many_together_as_there_are_tokens_to_a_pass() -> None:
    work = Recorded()
    assert passes(work, tokens=3).run(texts(1, 1, 1)) == [1, 2, 3]
    assert work.shapes == [(3, 1)]
    shapes: list[tuple[int, ...]] = []

    def nothing(batch: Batch, places: Sequence[int]) -> list[int]:
        shapes.append(tuple(batch["input_ids"].shape))
        return list(places)

    assert passes(nothing, tokens=3).run(texts(0, 0, 0)) == [0, 1, 2]
    assert shapes == [(3, 0)]


def test_tokens_that_are_generated_count_too() -> None:
    work = Recorded()
    passes(work, more_tokens=4).run(texts(2, 2, 2))
    assert work.shapes == [(2, 2), (1, 2)]
    ran = passes(Recorded(lambda ids: ids.numel() > 4), tokens=25, more_tokens=4)
    assert ran.run(texts(2, 2, 2, 2)) == [1, 2, 3, 4]
    assert [event.action for event in ran.counts.oom_events] == ["tokens of a pass 24 -> 13"]
    with pytest.raises(OutOfMemoryError, match="one text of 5 tokens and 4 new ones "):
        passes(Recorded(lambda ids: True), more_tokens=4).run(texts(5))


def test_padding_is_on_the_side_that_was_asked_for() -> None:
    right, left = padded([[1, 2, 3], [4]], 9), padded([[1, 2, 3], [4]], 9, "left")
    assert right["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert left["input_ids"].tolist() == [[1, 2, 3], [9, 9, 4]]
    assert left["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_what_runs_out_of_memory_is_done_in_smaller_passes() -> None:
    work = Recorded(lambda ids: ids.numel() > 6)
    ran = passes(work)
    assert ran.run(texts(*[3] * 8)) == list(range(1, 9))
    # 12 tokens fail; 6 fit, and no larger pass is tried again.
    assert work.shapes == [(4, 3), (2, 3), (2, 3), (2, 3), (2, 3)]
    (event,) = ran.counts.oom_events
    assert (event.phase, event.micro_batch, event.action) == ("evaluation", 4, "tokens of a pass 12 -> 6")


def test_a_size_that_fitted_before_gets_one_more_try() -> None:
    ran = passes(work := Recorded())
    with armed("evaluation", 2):
        assert ran.run(texts(*[3] * 12)) == list(range(1, 13))
    assert work.shapes == [(4, 3), (4, 3), (4, 3)]
    assert [event.action for event in ran.counts.oom_events] == ["tokens of a pass 12 -> 12"]
    ran = passes(Recorded())
    with armed("evaluation", 2):
        ran.run(texts(*[3] * 6))
    assert [event.action for event in ran.counts.oom_events] == ["tokens of a pass 6 -> 6"]  # the last has two texts


def test_a_single_text_gets_a_last_try() -> None:
    ran = passes(work := Recorded())
    with armed("evaluation", 1):
        assert ran.run(texts(20)) == [1]
    assert [event.action for event in ran.counts.oom_events] == ["the same text again"]
    assert work.shapes == [(1, 20)]


def test_a_text_that_does_not_fit_by_itself_is_an_error_that_says_its_length() -> None:
    with pytest.raises(OutOfMemoryError, match=r"one text of 20 tokens .* larger --budget to resume"):
        passes(Recorded(lambda ids: ids.shape[1] > 10)).run(texts(3, 20, 3))


@pytest.mark.parametrize("seed", range(20))
def test_no_text_is_lost_or_doubled_whatever_fails(seed: int) -> None:
    generator = random.Random(seed)
    lengths = [generator.randrange(1, 12) for _ in range(60)]
    ran = passes(tokens=48)
    with armed("evaluation", *generator.sample(range(1, 40), 4)):
        assert ran.run(texts(*lengths)) == list(range(1, 61))
    assert ran.counts.num_tokens == sum(lengths)


def test_it_can_be_stopped_between_two_passes() -> None:
    calls: list[int] = []

    def between() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    work = Recorded()
    with pytest.raises(KeyboardInterrupt):
        passes(work).run(texts(*[3] * 12), between)
    assert len(work.shapes) == 1


def test_passes_depend_on_the_texts_alone() -> None:
    lengths = [random.Random(1).randrange(1, 30) for _ in range(100)]
    first, second = Recorded(), Recorded()
    passes(first, tokens=64).run(texts(*lengths))
    passes(second, tokens=64).run(texts(*lengths))
    assert first.shapes == second.shapes


def test_nothing_is_no_pass() -> None:
    assert passes().run([]) == []


def test_a_free_id_is_a_token_of_none_of_the_texts() -> None:
    batch = padded([[0, 1, 4], [2]], 3)  # the padding id is not in the texts
    assert free_id(batch, 6) == 3
    assert free_id(padded([[0, 1], [3, 2]], 0), 4) is None


@pytest.mark.parametrize("vocab_size", [9, 8], ids=["a token is free", "each token is in a text"])
def test_a_classifier_without_padding_says_of_each_text_what_it_says_of_it_alone(
    tmp_path: Path, vocab_size: int
) -> None:
    fields = {"num_labels": 3, "pad_token_id": None, "vocab_size": vocab_size, "initializer_range": 1.0}
    folder = model_folder(tmp_path / "m", "LlamaForSequenceClassification", **fields)
    task = inference_task("classify", folder)
    model: Any = load_model(folder, head="classification").model
    rows = [[1, 2, 3, 4], [5, 0], [6, 7, 0]]  # the padding id is also a token of texts
    with torch.inference_mode():
        model.config.pad_token_id = None
        alone = [task.compute(model, padded([row], 0)) for row in rows]
        together = computed_to_the_end(task, model, padded(rows, 0), vocab_size)
    for found, expected in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.allclose(found, torch.cat(expected), atol=1e-5)
