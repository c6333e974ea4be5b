"""The declared fields of techniques: valid words and references, and behaviour that matches them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from torch import nn

import plimsoll.diagnose.causes as causes
from plimsoll.models.names import own_techniques
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Numerics
from plimsoll.records.trace import Category, Phase
from plimsoll.techniques import TECHNIQUES, installed
from plimsoll.techniques.mechanisms.technique import STAGES, Exported, Moved, Need, Part, Tool
from technique_trainings import TRAININGS, choices_of, setup_for

pytestmark = pytest.mark.usefixtures("small_storages_leave")

every_technique = pytest.mark.parametrize("name", TECHNIQUES)

# First the techniques that change the training or move states and parameters, which stay active across fallbacks.
IN_ORDER = [
    "autocast", "lora", "adaptive_softmax", "adafactor", "low_bit_optimizer", "fully_shard", "micro_batch", "by_length",
    "optimizer_kernel", "optimizer_offload", "parameter_offload", "layer_streaming", "attention", "chunked_loss",
    "truncated_bptt", "time_segments", "packed_stretches", "checkpointing", "gradient_cache", "activation_offload",
    "optimizer_in_backward", "cuda_graph", "evaluation", "heap", "allocator", "cache",
]  # fmt: skip


def test_they_are_installed_in_this_order():
    assert [name for name in TECHNIQUES if name in own_techniques()] == IN_ORDER
    assert set(own_techniques()) == set(IN_ORDER)


@every_technique
def test_each_field_has_words_that_there_are(name):
    technique = TECHNIQUES[name]
    assert technique.name == name
    assert name.isidentifier()
    assert technique.numerics in get_args(Numerics)
    assert technique.stage in STAGES
    for said, words in (
        (technique.modifies, Part), (technique.moves, Moved), (technique.reaches, Category),
        (technique.only_in, Phase), (technique.needs, Need), (technique.exports.keys(), Tool),
    ):  # fmt: skip
        assert said <= set(get_args(words))
    assert all(
        reason and not reason.endswith(".") for reason in (*technique.excludes.values(), technique.by_hand or "-")
    )
    for field, default in vars(type(technique).__mro__[-3]).items():
        if isinstance(default, bool):
            assert isinstance(getattr(technique, field), bool), field


@every_technique
def test_what_each_names_is_there(name):
    technique = TECHNIQUES[name]
    assert technique.excludes.keys() <= TECHNIQUES.keys()
    found = {path.stem for folder in causes.__path__ for path in Path(folder).glob("*.py")}
    assert technique.remedies.keys() <= found


def test_remedies_of_a_cause_have_places_of_their_own():
    places = [place for technique in TECHNIQUES.values() for place in technique.remedies.items()]
    assert len(places) == len(set(places))


@every_technique
def test_what_is_lossy_is_for_the_run_and_what_is_not_traced_changes_nothing(name):
    technique = TECHNIQUES[name]
    assert technique.is_for_the_run or technique.numerics != "lossy"
    assert technique.is_traced or not (technique.modifies | technique.moves)


@pytest.mark.sampled(4)
@every_technique
@pytest.mark.parametrize("training", TRAININGS)
def test_it_changes_no_part_of_a_training_that_it_does_not_say(name, training):
    technique = TECHNIQUES[name]
    for choice in choices_of(name, training):
        workload = setup_for(training, [name]).workload()
        before, places = parts_of(workload), places_of(workload)
        with installed(workload, (choice,)):
            inside = parts_of(workload)
            moved = {key for key, place in places_of(workload).items() if places.get(key, place) != place}
        changed = {part for part, value in before.items() if inside[part] != value}
        assert changed <= technique.modifies | ({"loss"} & technique.needs)
        assert not moved or "parameters" in technique.moves
        assert all(isinstance(exported, Exported) for exported in exports_of(technique, choice))
        assert (technique.precision_of(choice) is not None) == ("precision" in technique.modifies)


def parts_of(workload: Workload) -> dict[str, object]:
    optimizer = workload.optimizer
    kernels = [(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups]
    updated = [[id(one) for one in group["params"]] for group in optimizer.param_groups]
    modules = {name: (type(one), "forward" in vars(one)) for name, one in workload.model.named_modules()}
    return {
        "model": (modules, list(map(id, workload.model.parameters()))),
        "loss": workload.loss,
        "optimizer": (id(optimizer), kernels, updated, workload.hooks.update_early),
        "precision": workload.precision,
        "batch cut": (workload.hooks.cut, workload.hooks.evaluation_samples),
    }


def places_of(workload: Workload) -> dict[int, int]:
    return {id(one): one.data_ptr() for one in workload.model.parameters() if isinstance(one, nn.Parameter)}


def exports_of(technique, choice):
    found = (technique.exported(choice, tool, device) for tool in get_args(Tool) for device in ("cpu", "cuda"))
    return [one for one in found if one is not None]
