"""Remedies of a small job for a named GPU that is absent: 8000 words, whose logits are most of the peak.

The context takes some 140 MiB and the plain loop at most 430 MiB.
"""

import sys
from contextlib import ExitStack

import pytest

from peak_evidence import tried
from plimsoll.models.build import build_model, save_model
from plimsoll.planning.plan import plan_job, planner_of
from plimsoll.planning.remedies import _rank, _Search, choices_in_force, find_remedies
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice, micro_batch_plan

MIB = 1 << 20
LSTM = {"architecture": "lstm", "embedding_size": 256, "hidden_size": 256}
SMALL = {"model": {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32}, "optimizer": {"name": "sgd"}}
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
    assert (found.remedies, found.notes) == ((), ())
    assert [text.partition(":")[0] for text in told] == ["tracing", "searching"]
    assert found.prediction.peak.likely_bytes > TIGHT_BYTES
    assert found.vocab_size == 8000


@pytest.mark.parametrize("free_bytes", [0, -1])
def test_a_job_fits_where_the_most_that_it_may_need_does(free_bytes):
    """The likely peak is far below both limits; the upper estimate decides."""
    need_bytes = find_remedies(job(), device="rtx3060", limit_bytes=1000 * MIB).prediction.peak.high_bytes
    found = find_remedies(job(), device="rtx3060", limit_bytes=need_bytes + free_bytes, most_seconds=-1.0)
    assert bool(found.notes) == (free_bytes < 0)


def test_the_vocabulary_is_the_model_s_own_where_that_is_larger_than_the_tokenizer_s(tmp_path):
    gpt2 = {"architecture": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}
    few = {"tokenizer": {"vocab_size": 300}, "batch_size": 1}
    save_model(build_model(job(model=gpt2), vocab_size=900, num_labels=None, end_id=0), tmp_path)
    saved = job(model=str(tmp_path), **few)
    assert find_remedies(saved, device="rtx3060", limit_bytes=1000 * MIB).vocab_size == 900


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
        assert one.saving_bytes >= before.likely_bytes // 100  # others are left out


def test_the_combination_of_the_plan_is_offered_with_what_it_saves_and_what_it_costs(found):
    plan = plan_job(job(), device="rtx3060", limit_bytes=TIGHT_BYTES)
    (combination,) = [one for one in found.remedies if one.choices == plan.choices]
    before, after = plan.plain, plan.fallbacks[0]
    savings = [
        getattr(before.peak, name) - getattr(after.peak, name) for name in ("likely_bytes", "low_bytes", "high_bytes")
    ]
    assert (combination.saving_bytes, combination.saving_low_bytes, combination.saving_high_bytes) == (
        savings[0],
        min(savings),
        max(savings),
    )
    assert combination.step_time_factor == after.step_time.likely_seconds / before.step_time.likely_seconds
    assert combination.text.startswith("the fastest combination")
    assert found.notes == ()


def test_techniques_are_tried_one_by_one_and_each_once(found):
    alone = [one.choices[0].technique for one in found.remedies if len(one.choices) == 1]
    assert len(alone) == len(set(alone))
    assert {"micro_batch", "chunked_loss", "optimizer_offload", "allocator"} <= set(alone)
    for one in found.remedies:
        if len(one.choices) == 1 and not one.changes_training:
            assert one.settings == {"budget.device": "330MiB", "pin": [str(one.choices[0])]}
    (chunks,) = [one for one in found.remedies if [c.technique for c in one.choices] == ["chunked_loss"]]
    assert chunks.text.startswith("output layer and cross entropy")


def test_what_the_job_does_not_allow_says_what_it_must_say(found):
    changing = {one.choices[0].technique: one for one in found.remedies if one.changes_training}
    assert changing["adaptive_softmax"].settings["allow"] == ["adaptive_softmax"]


def test_without_time_only_the_plan_is_there():
    found = find_remedies(job(), device="rtx3060", limit_bytes=TIGHT_BYTES, most_seconds=-1.0)
    assert len(found.remedies) == 1
    assert found.notes[0].startswith("There was no time left to try micro_batch, ")


@pytest.mark.parametrize(
    ("limit_bytes", "settings"),
    [(None, {}), (180 * MIB, {"budget.device": "180MiB"}), (180 * MIB + 1, {"budget.device": 180 * MIB + 1})],
)
def test_a_budget_that_is_not_the_job_s_is_said_to_it(limit_bytes, settings):
    of_less = job(**SMALL, pin=["micro_batch=16"], budget={"device": "180MiB"})
    found = find_remedies(of_less, device="rtx3060", limit_bytes=limit_bytes, most_seconds=-1.0)
    assert [one.settings for one in found.remedies] == [settings]


def test_what_cannot_make_the_peak_smaller_is_not_tried():
    """With one sample, activations are a hundredth of the context; an LSTM also has cuDNN's workspace."""
    gpt2 = {"architecture": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}
    of_one = job(**SMALL | {"model": gpt2}, tokenizer={"vocab_size": 1000}, batch_size=1)
    found = find_remedies(of_one, device="rtx3060", limit_bytes=110 * MIB, most_seconds=-1.0)
    assert found.notes[0] == "There was no time left to try allocator."


def test_what_cannot_fit_names_the_smallest_budget_of_a_plan():
    alone = job(**SMALL, pin=["micro_batch=16"])
    found = find_remedies(alone, device="rtx3060", limit_bytes=110 * MIB, most_seconds=-1.0)
    smallest_mib = -(-plan_job(alone, device="rtx3060", limit_bytes=110 * MIB).smallest_budget_bytes // MIB)
    assert found.notes[-1] == (
        "No combination that keeps the training unchanged fits: the smallest budget for which a plan was found is "
        f"{smallest_mib}.0 MiB (`--budget {smallest_mib}MiB`)."
    )
    assert [(one.fits, one.text) for one in found.remedies] == [
        (False, "the evaluated combination that needs the least memory")
    ]


@pytest.fixture
def searching():
    """Return a function that creates the search for remedies of a combination inside a limit."""
    with ExitStack() as stack:

        def begin(of, limit_bytes, *in_force):
            told = stack.enter_context(planner_of(of, "rtx3060", limit_bytes, ((), ()), None, None))
            return _Search(told, of, limit_bytes, told.evaluate_at_length(in_force or told.plain_choices))

        yield begin


@pytest.mark.parametrize("samples", [8, 6, 4, 3, 2, 1])
def test_of_the_options_of_a_technique_the_weakest_that_fits_is_found(samples, searching):
    of = job(**SMALL | {"tokenizer": {"vocab_size": 16_000}})
    need_bytes = searching(of, 1000 * MIB, micro_batch_choice(samples)).before.need_bytes
    search = searching(of, need_bytes)
    offered = next(iter(search._offered()))
    assert offered == tuple(map(micro_batch_choice, (8, 6, 4, 3, 2, 1)))
    evaluation, choice = search._weakest_that_fits(offered)
    assert (choice, evaluation.need_bytes) == (micro_batch_choice(samples), need_bytes)


def test_what_is_in_force_or_goes_not_with_it_is_not_offered(searching):
    chunks = Choice(technique="chunked_loss", options={"chunk_tokens": 1024})
    search = searching(job(), TIGHT_BYTES, micro_batch_choice(1), chunks)
    assert not {"chunked_loss", "micro_batch"} & {options[0].technique for options in search._offered()}
    search = searching(job(), TIGHT_BYTES, micro_batch_choice(8))
    assert search._weakest_that_fits((Choice(technique="optimizer_in_backward"),)) is None
    assert search.notes == []


@pytest.mark.parametrize(("precision", "is_offered"), [("fp32", True), ("bf16", False), ("auto", True)])
def test_half_precision_is_offered_where_the_job_says_none(precision, is_offered, searching):
    search = searching(job(precision=precision), TIGHT_BYTES)
    (half,) = [options for options in search._offered() if options[0].technique == "autocast"] or [()]
    assert bool(half) == is_offered
    for choice in half:
        assert ("precision" in search._settings((choice,))) == (precision == "fp32")


def test_what_the_job_allows_stays_allowed_and_what_it_pins_otherwise_is_replaced(searching):
    search = searching(
        job(allow=["adafactor"], pin=["micro_batch=4", "chunked_loss(chunk_tokens=64)", "heap=never"]), None
    )
    low_bit = Choice(technique="low_bit_optimizer", options={"bits": 4})
    assert search._settings((low_bit, Choice(technique="adafactor")))["allow"] == ["adafactor", "low_bit_optimizer"]
    assert "allow" not in search._settings((Choice(technique="adafactor"),))
    chunks = Choice(technique="chunked_loss", options={"chunk_tokens": 256})
    assert search._settings((micro_batch_choice(2), chunks)) == {"pin": ["heap=never", "micro_batch=2", str(chunks)]}


WHOLE_BATCHES = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 256)
        self.head = nn.Linear(256, vocab_size)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids.view(16, 64)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})()


def model(vocab_size):
    return Net(vocab_size)
"""


def test_what_fails_when_it_is_tried_is_no_remedy_and_is_said(tmp_path, monkeypatch, searching):
    (tmp_path / "of_whole_batches.py").write_text(WHOLE_BATCHES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_whole_batches", raising=False)
    search = searching(job(model="of_whole_batches:model"), TIGHT_BYTES)
    assert search._weakest_that_fits((micro_batch_choice(8), micro_batch_choice(4))) is None
    (note,) = search.notes
    assert note.startswith("micro_batch=4 could not be tried: the model ")


def test_a_run_is_looked_at_with_what_it_had_in_force():
    found = find_remedies(job(), device="rtx3060", limit_bytes=1000 * MIB, in_force=(micro_batch_choice(2),))
    assert found.prediction.micro_batch == 2
    assert found.remedies == ()


@pytest.mark.slow
def test_what_cannot_fit_names_the_smallest_budget():
    found = find_remedies(job(), device="rtx3060", limit_bytes=150 * MIB)
    assert not any(one.fits and not one.changes_training for one in found.remedies)
    assert found.notes[-1].startswith("No combination that keeps the training unchanged fits: the smallest budget")


@pytest.mark.long
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
    fallback = plan.fallbacks[0].model_copy(update={"choices": (micro_batch_choice(8), Choice(technique="heap"))})
    mixed = plan.model_copy(update={"fallbacks": (fallback,)})
    assert choices_in_force(mixed, 0, 2) == (micro_batch_choice(2), Choice(technique="heap"))


def test_of_remedies_that_fit_alike_the_one_that_saves_more_comes_first():
    chosen = [tried("checkpointing", saving_mib) for saving_mib in (10, 30, 20)]
    assert [one.saving_bytes >> 20 for one in sorted(chosen, key=_rank)] == [30, 20, 10]


def test_what_is_not_known_of_a_remedy_puts_it_behind_those_of_which_it_is():
    slow, unknown_time = tried("heap", step_time_factor=99.0), tried("heap", step_time_factor=None)
    unknown_saving = tried("heap", step_time_factor=99.0).model_copy(update={"saving_bytes": None})
    assert sorted([unknown_time, unknown_saving, slow], key=_rank) == [slow, unknown_saving, unknown_time]
