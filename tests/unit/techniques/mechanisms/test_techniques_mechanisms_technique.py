"""The defaults of a setting, and of a technique that defines only the required methods."""

from contextlib import nullcontext

import pytest
from torch import nn

from plimsoll.records.allocator import TIGHT_HEAP
from plimsoll.records.plan import Choice
from plimsoll.techniques import Setting, Technique
from plimsoll.techniques.mechanisms.technique import Exported, by_deepspeed


class Plain(Technique):
    name, numerics, summary = "plain", "bitwise", "nothing is done"

    def choices(self, workload, setting):
        return (CHOICE,)

    def install(self, workload, choice):
        return nullcontext()


class Exporting(Plain):
    excludes = {"lora": "there is nothing left to do"}
    exports = {"deepspeed": lambda choice, device: Exported({device: choice.technique})}


CHOICE, LORA = Choice(technique="plain"), Choice(technique="lora")


def test_a_setting_allows_nothing_and_leaves_nothing_open_by_itself():
    setting = Setting("cpu", batch_size=4)
    assert (setting.allow, setting.precision, setting.lengths_vary, setting.trace) == (frozenset(), "fp32", False, None)
    assert setting.ask_rows is None


def test_what_says_nothing_more_is_taken_for_the_least_that_is_safe():
    plain = Plain()
    assert plain.keeps_state_between_passes
    assert plain.is_traced
    assert not (plain.modifies | plain.moves | plain.reaches | plain.needs | plain.only_in)
    assert plain.conflicts(CHOICE, (LORA,), None, Setting("cpu", 4)) is None
    assert plain.exported(CHOICE, "accelerate", "cuda") is None
    assert (plain.precision_of(CHOICE), plain.gradient_steps(CHOICE, 100)) == (None, None)
    assert not plain.builds_outside(CHOICE, "cpu")
    assert not plain.kept_on_host(CHOICE, nn.Linear(1, 1))
    assert (plain.heap_rules(CHOICE), plain.allocator_settings(CHOICE)) == (None, "")
    assert type("Tight", (Plain,), {"sets_up_heap": True})().heap_rules(CHOICE) == TIGHT_HEAP


def test_what_a_technique_says_is_what_its_methods_answer():
    told = Exporting()
    assert told.conflicts(CHOICE, (CHOICE, LORA), None, Setting("cpu", 4)) == "there is nothing left to do"
    assert told.conflicts(CHOICE, (CHOICE,), None, Setting("cpu", 4)) is None
    assert told.exported(CHOICE, "deepspeed", "cuda") == Exported({"cuda": "plain"})
    assert told.exported(CHOICE, "accelerate", "cuda") is None
    assert by_deepspeed(CHOICE, "cuda").settings == {"distributed_type": "DEEPSPEED"}


def test_what_does_not_say_what_it_does_is_none():
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Technique,), {"name": "half", "install": Plain.install})()
