"""Plans for a model in a user's program, and the training that results."""

import copy
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plimsoll.data.batches.loader import iterate_once
from plimsoll.data.datasets import with_rows
from plimsoll.data.prepare import prepare
from plimsoll.data.quick_facts import TextSketch, texts_of
from plimsoll.errors import InputError
from plimsoll.models.assemble import Assembled, assemble
from plimsoll.models.workload import Workload, resident_bytes
from plimsoll.planning.constraints import setting_of
from plimsoll.planning.dry_run.step import _batch
from plimsoll.planning.inputs import JobInput, StepInput
from plimsoll.planning.plan import plan_step
from plimsoll.records.job import Job
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, conflict_among
from workloads import CASES

CASE = next(case for case in CASES if case.name == "gpt2")
MIB = 1 << 20


def planned(budget, **options):
    model, optimizer = CASE.fresh()
    return plan_step(model, optimizer, CASE.batches()[0], units=CASE.units, budget=budget, device="cpu", **options)


@pytest.mark.long
def test_where_memory_is_plenty_nothing_is_changed_that_costs_time():
    plan = planned("4GiB")
    assert plan.fits
    assert plan.prediction.subject == "GPT2LMHeadModel, 8 samples a step, fp32"
    assert plan.fallbacks[0].micro_batch == 8
    assert plan.fallbacks[-1].micro_batch == 1


def test_the_step_runs_what_was_planned():
    plan = planned("4GiB", pins=["checkpointing=all", "micro_batch=4"])
    model, optimizer = CASE.fresh()
    plain = copy.deepcopy(model)
    step = TrainStep(model, optimizer, units=CASE.units, fallbacks=plan.choices_by_fallback)
    result = step(CASE.batches()[0])
    assert result.micro_batch == 4
    step.close()
    assert set(vars(model.transformer.h[0])) == set(vars(plain.transformer.h[0]))


def test_the_model_is_not_changed_and_may_have_no_memory():
    model, optimizer = CASE.fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan_step(model, optimizer, CASE.batches()[0], units=CASE.units, budget="4GiB", device="rtx3060")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    with torch.device("meta"):
        shapes = CASE.build().train()
    optimizer = torch.optim.AdamW(shapes.parameters())
    plan = plan_step(shapes, optimizer, CASE.batches()[0], units=CASE.units, budget="4GiB", device="rtx3060")
    assert plan.fits


@pytest.mark.long
def test_too_little_is_said_with_what_would_do():
    plan = planned(100 * MIB)
    assert not plan.fits
    assert plan.smallest_budget_bytes > 100 * MIB


def test_bad_constraints_are_refused_before_anything_is_traced():
    with pytest.raises(InputError, match="there is no technique `chekpointing`"):
        planned("4GiB", pins=["chekpointing=all"])


def input_of_batch(batch, precision="fp32", units=None):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    return StepInput(model, optimizer, batch, lambda model, batch: None, units, None, precision, frozenset())


TOKENS = {"input_ids": torch.zeros(3, 7, dtype=torch.long), "labels": torch.zeros(3, dtype=torch.long)}


@pytest.mark.parametrize(
    ("batch", "length", "varies"),
    [
        (TOKENS, 7, False),
        (TOKENS | {"attention_mask": torch.ones(3, 9)}, 9, True),
        (TOKENS | {"images": torch.zeros(3, 50, 2)}, 7, False),
        (torch.zeros(3, 4, 4), None, False),
        ((torch.zeros(3), "attention_mask"), None, False),
    ],
)
def test_a_batch_says_how_long_its_samples_are_and_whether_all_are(batch, length, varies):
    planning_input = input_of_batch(batch)
    assert (planning_input.batch_size, planning_input.sequence_length, planning_input.lengths_vary) == (
        3,
        length,
        varies,
    )
    assert (planning_input.num_ranks, planning_input.evaluates_between_steps) == (1, False)


@pytest.mark.parametrize(("precision", "own"), [("fp32", "fp32"), ("auto", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_a_precision_that_is_left_to_the_plan_is_full_where_none_is_chosen(precision, own):
    workload = input_of_batch(TOKENS, precision).workload
    assert (workload.precision, workload.units) == (own, "samples")
    assert input_of_batch(TOKENS, units="tokens").workload.units == "tokens"


@pytest.mark.parametrize(
    ("validation", "every", "evaluates"), [(0.1, 5, True), (0.1, None, False), (None, 5, False), (None, None, False)]
)
def test_a_job_evaluates_between_its_steps_where_it_has_what_to_evaluate_and_says_when(validation, every, evaluates):
    fields = {"model": "lstm", "sequence_length": 8, "batch_size": 4, "ranks": 2}
    data = {"train": "nowhere.txt", "validation": validation}
    planning_input = JobInput(Job.from_fields(fields | {"data": data, "evaluate_every": every}))
    assert planning_input.evaluates_between_steps == evaluates
    assert (planning_input.batch_size, planning_input.num_ranks, planning_input.lengths_vary) == (2, 2, False)


# -- what is planned is what is built ----------------------------------------------------------------------------------

TEXTS = {
    "repetitive": ["word " * 300] * 12,
    "short": ["a few words here", "and fewer", "one", "some more of these words, though not many"] * 9,
    "long": [" ".join(random.Random(seed).choices(["the", "cat", "sat", "on", "mats"], k=90)) for seed in range(24)],
    "many words": [" ".join(f"w{number}x{line}" for number in range(40)) for line in range(24)],
}  # fmt: skip
MODELS: list[dict[str, Any]] = [
    {"architecture": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2},
    {"architecture": "lstm", "hidden_size": 8, "embedding_size": 8},
]
OF_A_MODEL: list[dict[str, Any]] = [
    {},
    {"data.validation": 0.2},
    {"data.stride": 8},
    {"data.pack": True, "data.unit": "line", "model": MODELS[0]},
    {"data.borders": "sentence", "data.unit": "line"},
    {"data.on_the_fly": True, "data.unit": "line", "data.long_texts": "truncate"},
    {"tokenizer.train": "words"},
    {"tokenizer.vocab_size": 300, "sequence_length": 40},
]
OF_LABELS: list[dict[str, Any]] = [
    {},
    {"data.validation": 0.2},
    {"data.long_texts": "truncate"},
    {"data.order": "by_length"},
    {"data.order": "by_length", "batch_tokens": 128},
    {"data.augment.delete": 0.2},
    {"data.on_the_fly": True, "data.long_texts": "truncate"},
]


def jobs_of(folder: Path) -> Iterable[Job]:
    """Yield many small jobs; most of them have fewer samples, tokens or steps than their fields ask for."""
    for name, texts in TEXTS.items():
        (folder / f"{name}.txt").write_text("\n".join(texts))
        rows = [{"text": text, "label": f"class {number % 3}"} for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        tagged = [
            "".join(f"{word} {'N' if place % 3 else 'O'}\n" for place, word in enumerate(text.split()[:50]))
            for text in texts
        ]
        (folder / f"{name}.conll").write_text("\n".join(tagged))
    of_kinds = [("txt", "language-modeling", OF_A_MODEL), ("jsonl", "classification", OF_LABELS)]
    of_kinds += [("conll", "token-classification", [{}, {"data.validation": 0.2}])]
    number = 0
    for name, (suffix, task, variants) in itertools.product(TEXTS, of_kinds):
        for changes in variants:
            number += 1
            fields: dict[str, Any] = {
                "model": MODELS[number % 2], "task": task, "sequence_length": 32, "batch_size": 4,
                "data.train": str(folder / f"{name}.{suffix}"), "device": "cpu",
            } | ({"data.text": "text", "data.label": "label"} if suffix == "jsonl" else {}) | changes  # fmt: skip
            yield Job.from_fields(_nested(fields))


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        place, *path = name.split(".")
        inner = nested
        for part in path:
            inner, place = inner.setdefault(place, {}), part
        inner[place] = value
    return nested


def shapes_of(model: nn.Module) -> dict[str, Any]:
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    return {name: (tuple(value.shape), value.dtype) for name, value in named}


def widest(batches: Iterable[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the fields of batches, each dimension with its maximum over them."""
    found: dict[str, Any] = {}
    for batch in batches:
        for name, value in batch.items():
            before = found.get(name, (value.dtype, (0,) * value.dim()))[1]
            found[name] = value.dtype, tuple(map(max, before, value.shape))
    return found


def verdicts(workload: Workload, setting: Any) -> dict[str, Any]:
    """Return the choices of each technique for a workload, or its reason against them, and their conflicts."""
    offered = {name: technique.choices(workload, setting) for name, technique in TECHNIQUES.items()}
    return {
        name: choices
        if isinstance(choices, str)
        else [(str(choice), conflict_among((choice,), workload, setting)) for choice in choices]
        for name, choices in offered.items()
    }


def built(job: Job, parts: Assembled) -> Workload:
    return Workload(
        parts.model, parts.optimizer, parts.loss, parts.units, clip_norm=job.optimizer.clip_norm,
        precision=job.own_precision,
    )  # fmt: skip


def assert_planned_is_built(job: Job, cache: Path) -> TextSketch:
    prepared = with_rows(prepare(job, cache), job)
    texts = texts_of(prepared)
    planning_input, parts = JobInput(job, texts=texts), assemble(job, prepared, "cpu")
    assert shapes_of(planning_input.workload.model) == shapes_of(parts.model)
    assert resident_bytes(planning_input.workload.model, planning_input.workload.optimizer) == resident_bytes(
        parts.model, parts.optimizer
    )
    batches = [fields for _, fields in zip(range(len(parts.loader)), parts.loader, strict=False)]
    planned = widest([_batch(job, texts, job.batch_size, texts.longest)])
    if job.data.on_the_fly or job.batch_tokens:  # rows are known only when they are read; they may have any length
        assert texts.longest == job.sequence_length
        assert {name: value[0] for name, value in planned.items()} == {
            name: value[0] for name, value in widest(batches).items()
        }
    elif job.data.augment is None:
        assert planned == widest(batches)
    assert (parts.validation is None) == (texts.held_out is None)
    if parts.validation is not None:
        held_out = (batch.fields for batch in iterate_once(parts.validation, job.batch_size))
        assert widest([_batch(job, texts, *texts.held_out)]) == widest(held_out)
    setting = setting_of(planning_input, "cpu")
    assert verdicts(planning_input.workload, setting) == verdicts(built(job, parts), setting)
    return texts


@pytest.mark.long
def test_what_is_planned_is_what_is_built_over_many_small_jobs(tmp_path: Path) -> None:
    found = [(job, assert_planned_is_built(job, tmp_path / "cache")) for job in jobs_of(tmp_path)]
    assert len(found) > 60
    smaller = [job for job, texts in found if texts.vocab_size < job.tokenizer.vocab_size]
    shorter = [job for job, texts in found if texts.longest < job.sequence_length]
    assert min(len(smaller), len(shorter)) > 5  # otherwise the test shows nothing
