"""What a plan is made for, and what is said where something differs."""

import sys
from importlib.metadata import version

import pytest
import torch

from plimsoll.data.sketch import TextSketch
from plimsoll.plan.facts import differences, facts_of
from plimsoll.records.job import Job

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


def test_each_difference_is_said_with_both_values():
    now = facts(TextSketch(400, None, 0), "cuda sm_86", batch_size=9)
    assert list(differences(facts(), now)) == [
        "batch_size was 8, is 9", "vocabulary was 300, is 400", "target was cpu, is cuda sm_86",
    ]  # fmt: skip
    assert list(differences({"old": "1"}, {})) == ["old was 1, is not known"]


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
