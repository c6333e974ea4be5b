"""The setup of the heap and the CUDA allocator of a process for choices, and the resulting allocator rules."""

import subprocess
import sys

import pytest

from plimsoll.device.cpu import heap
from plimsoll.device.cuda import allocator_settings
from plimsoll.records.allocator import DEFAULT_HEAP, FAST_HEAP, KEPT_HEAP, MIB, AllocatorRules
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.allocators import allocator_rules, rules_in_force, set_up_as_with

pytestmark = pytest.mark.cold  # a heap as a process begins with

SHARDED = Choice(technique="fully_shard", options={"gathered": "once"})
KEPT = Choice(technique="heap", options={"mapped_from": "never"})
GROWS = Choice(technique="allocator", options={"expandable_segments": True})
SPLITS = Choice(technique="allocator", options={"max_split_size_mb": 64})


def test_a_model_that_is_shared_out_is_built_of_mappings_inside_a_budget():
    built = {"build_threshold_bytes": heap.TIGHT_BYTES}
    assert rules_in_force((SHARDED,), has_budget=True) == FAST_HEAP.model_copy(update=built)
    assert rules_in_force((KEPT, SHARDED), has_budget=True) == KEPT_HEAP.model_copy(update=built)
    assert rules_in_force((SHARDED,), has_budget=False) == DEFAULT_HEAP
    assert rules_in_force((), has_budget=True) == FAST_HEAP


BUILT = """
import torch
from plimsoll.device import process
from plimsoll.device.base import backend_for
from plimsoll.records.plan import Choice
from plimsoll.techniques.mechanisms.allocators import set_up_as_with, set_up_for_steps

choices = [Choice(technique="fully_shard", options={"gathered": "once"})]
with backend_for("cpu").limited(8 << 30):
    left = []
    for set_up in (lambda choices: set_up_as_with(choices, "cpu"), set_up_for_steps):
        set_up(choices)
        before = process.private_bytes()
        model = [torch.ones(1 << 18) for _ in range(33)]
        del model[:-1]  # what stays lies above the holes of the others
        left.append((process.private_bytes() - before) >> 20)
        del model
    print(*left)
"""


def test_built_so_it_leaves_no_holes_and_the_steps_have_the_heap_as_before():
    done = subprocess.run([sys.executable, "-c", BUILT], capture_output=True, text=True, check=True)
    built_mib, stepped_mib = map(int, done.stdout.split())
    assert built_mib <= 2
    assert stepped_mib >= 30


def test_the_rules_are_those_of_the_environment_and_the_choice(monkeypatch):
    for name in allocator_settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert allocator_rules(()) == AllocatorRules()
    assert allocator_rules((GROWS,)) == AllocatorRules(expandable_segments=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.5")
    assert allocator_rules((GROWS,)) == AllocatorRules(expandable_segments=True, garbage_collection_threshold=0.5)
    assert allocator_rules((SPLITS,)).max_split_bytes == 64 * MIB


def test_the_allocator_is_set_up_before_a_model_is_on_the_device(monkeypatch):
    given = []
    monkeypatch.setattr(allocator_settings, "set_up", given.append)
    set_up_as_with((Choice(technique="cache", options={"line_bytes": 0}), GROWS), "cuda:0")
    assert given == ["expandable_segments:True"]
