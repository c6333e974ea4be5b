"""The facts that a plan is made for, and the messages for differences."""

import contextlib
import itertools
import sys
from importlib.metadata import version

import pytest
import torch

from plimsoll.data.quick_facts import TextSketch
from plimsoll.errors import InputError, JobError
from plimsoll.planning.dry_run.step import _batch
from plimsoll.planning.plan_validity import differences, facts_of, require_prepared_for
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan

TEXTS = TextSketch(300, None, 0)
FIELDS = {"model": {"architecture": "gpt2", "n_layer": 2}, "data": "nowhere.txt", "batch_size": 8}


def facts(texts=TEXTS, target="cpu", **changes):
    return facts_of(Job.from_fields(FIELDS | changes), texts, target)


def test_facts_name_versions_shapes_and_target():
    found = facts()
    assert found["torch"] == torch.__version__
    assert found["plimsoll"] == version("torch-plimsoll")
    assert (found["vocabulary"], found["batch_size"], found["target"]) == ("300", "8", "cpu")


@pytest.mark.parametrize("same", [{"steps": 7}, {"seed": 3}, {"budget": "1GiB"}, {"checkpoint": {"every": 3}}])
def test_what_changes_no_memory_changes_no_fact(same):
    assert not list(differences(facts(), facts(**same)))


def test_a_state_that_is_carried_on_is_a_fact():
    assert not list(differences(facts(), facts(data={"train": "nowhere.txt", "order": "blocks"})))
    streams = {"train": "nowhere.txt", "order": "streams"}
    assert list(differences(facts(), facts(data=streams))) == ["streams was not known, is reset at no borders"]
    assert list(differences(facts(data=streams), facts(data=streams | {"reset": "texts"}))) == [
        "streams was reset at no borders, is reset at texts"
    ]


KINDS_OF_DATA = [
    {},
    {"order": "blocks"},
    {"order": "streams"},
    {"order": "streams", "reset": "texts"},
    {"pack": True},
    {"pack": True, "long_texts": "truncate"},
    {"stride": 64},
    {"borders": "sentence"},
    {"borders": "sentence", "order": "by_length"},
    {"on_the_fly": True, "long_texts": "truncate"},
    {"validation": 0.1},
    {"workers": 2, "on_error": "skip"},
]


def tensors_of(job):
    """Return the fields of a batch with their shapes, and the fields that are one tensor."""
    batch = _batch(job, TEXTS._replace(num_labels=2 if job.is_labelled else None), 2, 8)
    same = {name: min(other for other, value in batch.items() if value is batch[name]) for name in batch}
    return {name: (value.shape, value.dtype, same[name]) for name, value in batch.items()}, bool(job.data.validation)


@pytest.mark.parametrize("task", ["language-modeling", "classification"])
def test_data_have_the_same_facts_exactly_where_a_dry_run_has_the_same_tensors(task):
    """Otherwise a plan would be used for different data, or made again for no reason."""
    jobs = []
    for kind in KINDS_OF_DATA:
        with contextlib.suppress(JobError):  # not every kind of data suits every task
            jobs.append(Job.from_fields(FIELDS | {"task": task, "data": {"train": "nowhere.txt"} | kind}))
    assert len(jobs) > 4
    for one, other in itertools.combinations(jobs, 2):
        is_same = facts_of(one, TEXTS, "cpu") == facts_of(other, TEXTS, "cpu")
        assert is_same == (tensors_of(one) == tensors_of(other)), (one.data, other.data)


def test_an_evaluation_between_steps_is_a_fact():
    data = {"train": "nowhere.txt", "validation": 0.1}
    assert not list(differences(facts(), facts(evaluate_every=5)))  # there is no evaluation
    assert not list(differences(facts(data=data, evaluate_every=7), facts(data=data, evaluate_every=5)))
    assert list(differences(facts(data=data), facts(data=data, evaluate_every=5))) == [
        "evaluates was True, is between steps"
    ]


def test_each_difference_is_said_with_both_values():
    now = facts(TextSketch(400, None, 0), "cuda sm_86", batch_size=9)
    assert list(differences(facts(), now)) == [
        "batch_size was 8, is 9", "vocabulary was 300, is 400", "target was cpu, is cuda sm_86",
    ]  # fmt: skip
    assert list(differences({"old": "1"}, {})) == ["old was 1, is not known"]


def test_what_is_guessed_is_no_difference_and_a_plan_for_more_is_good_for_less():
    known = TEXTS._replace(longest=40, held_out=(8, 64))
    assert not list(differences(facts(TEXTS), facts(known)))  # a plan without these facts is for the maximum
    assert not list(differences(facts(known), facts(known._replace(longest=16, held_out=(2, 8)))))
    assert list(differences(facts(known), facts(known._replace(longest=48, held_out=(9, 64))))) == [
        "tokens of the longest row was 40, is 48", "samples of an evaluation batch was 8, is 9",
    ]  # fmt: skip
    other = TEXTS._replace(vocab_size=261)
    assert list(differences(facts(), facts(other))) == ["vocabulary was 300, is 261"]
    guess, guessed = TEXTS._replace(vocab_size=8000, num_labels=2), frozenset({"vocabulary", "labels"})
    assert not list(differences(facts(), facts(guess), guessed))  # 300 of the 8,000 that the job asks for
    assert list(differences(facts(guess), facts(), guessed)) == ["vocabulary was 8000, is 300"]


def test_a_plan_is_refused_where_the_texts_came_out_otherwise_than_it_has_them():
    texts = TEXTS._replace(longest=40)
    plan = micro_batch_plan(Budget(), (8,)).model_copy(update={"made_for": facts(texts)})
    require_prepared_for(plan, texts._replace(longest=16))
    require_prepared_for(plan.model_copy(update={"made_for": {}}), texts._replace(vocab_size=261))  # a plan for any job
    with pytest.raises(InputError, match="vocabulary was 300, is 261; leave --plan out"):
        require_prepared_for(plan, texts._replace(vocab_size=261))


def test_the_code_of_an_own_model_is_a_fact(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = "from torch import nn\n\ndef net():\n    return nn.Linear(2, {size})\n"
    found = []
    for size in (3, 4):
        (tmp_path / "own_net.py").write_text(source.format(size=size))
        sys.modules.pop("own_net", None)
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            found.append(facts(model="own_net:net"))
        finally:
            sys.dont_write_bytecode = before
    [difference] = differences(*found)
    assert difference.startswith("code of the model was sha256:")
