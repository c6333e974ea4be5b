"""The technique that docs/adding-a-technique.md shows keeps the contract of the registry."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from contract import test_contract_techniques as contract
from plimsoll.records.run import PHASES_OF_A_STEP
from plimsoll.techniques import TECHNIQUES
from technique_trainings import available_choices

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-technique.md"
NAME = "relu_in_place"


@pytest.fixture(autouse=True)
def _registered(tmp_path, monkeypatch):
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / f"{NAME}.py").write_text(program, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    from importlib import import_module

    technique = import_module(NAME).ReluInPlace()
    monkeypatch.setitem(TECHNIQUES, technique.name, technique)


def test_it_says_where_it_has_nothing_to_do():
    assert available_choices(NAME, "gpt2") == "no ReLU of T5's feed-forward layers"
    assert len(available_choices(NAME, "t5")) == 1


@pytest.mark.parametrize(
    "keeps_it",
    [
        contract.test_the_exit_restores_everything_and_gradients_are_those_of_plain_pytorch,
        contract.test_the_training_is_that_of_plain_pytorch,
        contract.test_a_dry_run_with_it_needs_what_a_run_with_it_needs,
    ],
)
def test_it_keeps_the_contract(keeps_it):
    keeps_it(NAME, "t5")


@pytest.mark.parametrize("phase", [phase for phase in PHASES_OF_A_STEP if phase != "fetch"])
def test_memory_that_runs_out_loses_nothing(phase):
    contract.test_memory_that_runs_out_in_any_phase_loses_nothing(NAME, phase)
