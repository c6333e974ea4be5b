"""Names read from sources are the real ones: torch and transformers themselves are the oracle."""

import dataclasses
import inspect

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from plimsoll.errors import JobError
from plimsoll.models import names as named
from plimsoll.models.names import (
    architectures,
    optimizer_arguments,
    remedies_for,
    require_model_fields,
    require_model_name,
    require_optimizer,
)
from plimsoll.records.job import OptimizerChoice
from plimsoll.techniques import TECHNIQUES
from processes import run_program

MAPPINGS = {
    "language-modeling": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token-classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


CHANGES = ", which changes the training"


@pytest.mark.parametrize("cause", sorted({cause for one in TECHNIQUES.values() for cause in one.remedies}))
def test_remedies_are_those_that_the_classes_say(cause):
    own = [TECHNIQUES[name] for name in named.own_techniques() if cause in TECHNIQUES[name].remedies]
    in_order = sorted(own, key=lambda one: one.remedies[cause])
    advice = [(one.by_hand or one.summary, one.numerics == "lossy") for one in in_order]
    assert list(remedies_for(cause)) == [one.name for one in in_order]
    assert list(remedies_for(cause).values()) == [f"{text}{CHANGES * is_lossy}" for text, is_lossy in advice]


@pytest.mark.parametrize("name", named.own_techniques())
def test_what_a_technique_advises_is_read_from_its_source_as_its_class_has_it(name):
    said, technique = named._said_by(name), TECHNIQUES[name]
    assert (said["numerics"], said["summary"]) == (technique.numerics, technique.summary)
    assert (said.get("by_hand", ""), said.get("remedies", {})) == (technique.by_hand, technique.remedies)


@pytest.fixture(params=[True, False], ids=["sources", "imported"])
def has_sources(request, monkeypatch):
    """Run with the real sources of torch and transformers, and with sources in an unknown layout."""
    if not request.param:
        monkeypatch.setattr(named, "_statements", lambda package, file: [])
    for function in (architectures, optimizer_arguments):
        monkeypatch.setattr(named, function.__name__, function.__wrapped__)


@pytest.mark.usefixtures("has_sources")
@pytest.mark.parametrize("task", MAPPINGS)
def test_architectures_are_those_of_transformers(task):
    assert named.architectures(task) == tuple(sorted(MAPPINGS[task]))


@pytest.mark.usefixtures("has_sources")
def test_optimizers_and_their_arguments_are_those_of_torch():
    classes = {name.lower(): one for name, one in vars(torch.optim).items() if isinstance(one, type)}
    found = named.optimizer_arguments()
    assert set(classes) - set(found) == {"optimizer", "lbfgs", "sparseadam", "muon"}
    for name, arguments in found.items():
        expected = [one for one in inspect.signature(classes[name]).parameters if one not in {"params", "lr"}]
        assert list(arguments) == expected, name


@pytest.mark.parametrize("part", [slice(None, None, 20), pytest.param(slice(None), marks=pytest.mark.long)], ids=str)
def test_fields_are_those_of_the_configurations_of_transformers(part):
    """This covers all architectures of language models and classifiers but two, which name their fields elsewhere."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    unknown = set()
    for name in sorted({name for names in MAPPINGS.values() for name in names})[part]:
        config = CONFIG_MAPPING[name]
        expected = ({field.name for field in dataclasses.fields(config)} | config.attribute_map.keys()) - common
        found = named._config_fields(name)
        unknown |= {name} if found is None else set()
        assert found is None or found == expected, name
    assert unknown <= {"data2vec-text", "gpt-sw3"}


def test_a_field_that_sources_do_not_tell_is_left_to_transformers(monkeypatch):
    model = {"architecture": "gpt2", "n_layr": 2}
    with pytest.raises(JobError, match="no field `n_layr`; did you mean `n_layer`"):
        require_model_fields(model)
    monkeypatch.setattr(named, "_statements", lambda package, file: [])
    require_model_fields(model)


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        ({"n_layer": 2}, "language-modeling", "it has the fields n_layer, but no architecture"),
        ({}, "language-modeling", "it has the fields none, but no architecture"),
        (
            {"architecture": "gtp2"},
            "language-modeling",
            "no language model of architecture `gtp2`; did you mean `gpt2`",
        ),
        (
            {"architecture": "lstn"},
            "classification",
            "no sequence classifier of architecture `lstn`; did you mean `lstm`",
        ),
        ("gpt2", "classification", "no folder gpt2; for a new model write `model: {architecture: gpt2}`"),
        ("org/tiny", "token-classification", "no folder org/tiny: download a model first .hf download org/tiny"),
    ],
)
def test_a_model_that_there_is_not_is_refused(model, task, message):
    with pytest.raises(JobError, match=message):
        require_model_name(model, task)


@pytest.mark.parametrize(
    "model", ["lstm", "package:function", "tests", {"architecture": "gru"}, {"architecture": "bert"}]
)
def test_a_model_that_there_is_passes(model):
    require_model_name(model, "classification")


def test_a_warm_up_must_end_in_the_steps():
    choice = OptimizerChoice(warmup_steps=5)
    require_optimizer(choice)
    require_optimizer(choice, 5)
    with pytest.raises(JobError, match="a warm-up of 5 steps is longer than the training of 4 steps"):
        require_optimizer(choice, 4)


def test_nothing_is_imported():
    program = (
        "import sys; from plimsoll.models.names import architectures, optimizer_arguments\n"
        "print(len(architectures('classification')) > 50, len(optimizer_arguments()) > 9, 'torch' in sys.modules)"
    )
    assert run_program(program).stdout == "True True False\n"
