"""Remedies of a small job for a GPU that is not here, by its name: 8000 words, of which the logits are most.

Its context takes some 120 MiB and the plain loop 436 MiB.
"""

import pytest

from peak_evidence import tried
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice, micro_batch_plan
from plimsoll.run.remedies import _rank, choices_in_force, find_remedies

MIB = 1 << 20
LSTM = {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256}
TIGHT_BYTES = 330 * MIB


def job(**changes):
    fields = {"model": LSTM, "data": "nowhere.txt", "tokenizer": {"vocab_size": 8000}}
    return Job.from_fields(fields | {"sequence_length": 64, "batch_size": 16} | changes)


@pytest.fixture(scope="module")
def found():
    return find_remedies(job(), device="rtx3060", limit_bytes=TIGHT_BYTES)


def test_a_job_that_fits_is_only_predicted():
    told = []
    found = find_remedies(job(), device="rtx3060", limit_bytes=1000 * MIB, progress=told.append)
    assert (found.remedies, found.notes, len(told)) == ((), (), 1)
    assert found.prediction.peak.likely_bytes > TIGHT_BYTES
    assert found.vocab_size == 8000


def test_what_fits_comes_first_then_what_leaves_the_training_then_the_faster(found):
    keys = [(not one.fits, one.changes_training, one.step_time_factor) for one in found.remedies]
    assert keys == sorted(keys)
    assert found.remedies[0].fits


def test_every_saving_is_predicted_and_lies_in_its_range(found):
    before = found.prediction.peak
    for one in found.remedies:
        assert one.known == "predicted"
        assert one.saving_low_bytes <= one.saving_bytes <= one.saving_high_bytes
        after_bytes = before.high_bytes - one.saving_high_bytes
        assert one.fits == (after_bytes <= TIGHT_BYTES)


def test_techniques_are_tried_one_by_one_and_each_once(found):
    alone = [one.choices[0].technique for one in found.remedies if len(one.choices) == 1]
    assert len(alone) == len(set(alone))
    assert {"micro_batch", "chunked_loss"} <= set(alone)
    (chunks,) = [one for one in found.remedies if [c.technique for c in one.choices] == ["chunked_loss"]]
    assert chunks.settings == {"budget.device": "330MiB", "pin": [str(chunks.choices[0])]}
    assert chunks.text.startswith("output layer and cross entropy")


def test_what_the_job_does_not_allow_says_what_it_must_say(found):
    changing = {one.choices[0].technique: one for one in found.remedies if one.changes_training}
    assert changing["adaptive_softmax"].settings["allow"] == ["adaptive_softmax"]


def test_without_time_only_the_plan_is_there():
    found = find_remedies(job(), device="rtx3060", limit_bytes=TIGHT_BYTES, most_seconds=-1.0)
    assert len(found.remedies) == 1
    assert found.notes[0].startswith("There was no time left to try micro_batch, ")


def test_a_run_is_looked_at_with_what_it_had_in_force():
    found = find_remedies(job(), device="rtx3060", limit_bytes=1000 * MIB, in_force=(micro_batch_choice(2),))
    assert found.prediction.micro_batch == 2
    assert found.remedies == ()


@pytest.mark.slow
def test_what_cannot_fit_names_the_smallest_budget():
    found = find_remedies(job(), device="rtx3060", limit_bytes=150 * MIB)
    assert not any(one.fits and not one.changes_training for one in found.remedies)
    assert found.notes[-1].startswith("Nothing that leaves the training as it is fits: the smallest budget")


def test_a_pin_of_the_job_stays_and_half_precision_is_said_to_the_job():
    small = {"architecture": "gpt2", "n_layer": 1, "n_embd": 256, "n_head": 2}
    few = {"tokenizer": {"vocab_size": 300}, "batch_size": 32, "sequence_length": 128, "pin": ["micro_batch=32"]}
    found = find_remedies(job(model=small, **few), device="rtx3060", limit_bytes=250 * MIB)
    alone = {one.choices[0].technique: one for one in found.remedies if len(one.choices) == 1}
    assert all(one.settings["pin"][0] == "micro_batch=32" for one in alone.values())
    half = alone["autocast"]
    assert half.settings | {"pin": ()} == {"budget.device": "250MiB", "precision": "auto", "pin": ()}
    assert half.changes_training


def test_what_was_in_force():
    plan = micro_batch_plan(Budget(), (8, 4))
    assert choices_in_force(plan, 1, None) == (micro_batch_choice(4),)
    assert choices_in_force(plan, 1, 1) == (micro_batch_choice(1),)
    assert choices_in_force(plan, 7, 16) == (micro_batch_choice(4),)
    assert choices_in_force(plan, None, None) == (micro_batch_choice(8),)
    rung = plan.rungs[0].model_copy(update={"choices": (micro_batch_choice(8), Choice(technique="heap"))})
    mixed = plan.model_copy(update={"rungs": (rung,)})
    assert choices_in_force(mixed, 0, 2) == (micro_batch_choice(2), Choice(technique="heap"))


def test_of_remedies_that_fit_alike_the_one_that_saves_more_comes_first():
    chosen = [tried("checkpointing", saving_mib) for saving_mib in (10, 30, 20)]
    assert [one.saving_bytes >> 20 for one in sorted(chosen, key=_rank)] == [30, 20, 10]
