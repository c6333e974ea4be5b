"""Configuration of a process's heap and of torch's CUDA allocator for a set of choices, and rules to simulate them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from plimsoll.device.cpu import data_limit, heap
from plimsoll.device.cuda import allocator_settings
from plimsoll.memory.allocator.options import rules_from_text
from plimsoll.records.allocator import DEFAULT_HEAP, FAST_HEAP, KEPT_HEAP, AllocatorRules, HeapRules
from plimsoll.records.plan import Choice
from plimsoll.techniques import technique_of
from plimsoll.techniques.mechanisms.technique import Choices


def set_up_as_with(choices: Choices, device: str) -> None:
    """Configure the allocators of this process for these choices, before the model is built.

    A model built in the heap of the steps leaves holes when its parameters move out: 11 of 376 MiB for a T5 whose
    parameters move to a file. So, if there is a budget, a model that will be sharded is built in memory mappings. Call
    `set_up_for_steps` once it is built.
    """
    if device != "cpu":
        for settings in _allocator_settings(choices):
            allocator_settings.set_up(settings)
    elif is_built_apart(choices) and data_limit.budget_in_force_bytes() is not None:
        data_limit.set_up_heap(heap.TIGHT_BYTES)
    elif (rules := heap_rules(choices)) is not None:
        _set_up_heap(rules)


def set_up_for_steps(choices: Choices) -> None:
    """Configure the heap for the steps, if `set_up_as_with` configured it differently for building the model."""
    if is_built_apart(choices) and data_limit.budget_in_force_bytes() is not None:
        _set_up_heap(heap_rules(choices) or FAST_HEAP)


def _set_up_heap(rules: HeapRules) -> None:
    data_limit.set_up_heap(None if rules == KEPT_HEAP else rules.mmap_threshold_bytes)


@contextmanager
def blocks_mapped_from(num_bytes: int | None) -> Iterator[None]:
    """Set the mmap threshold of this process; ``None``: no mappings.

    The exit sets the threshold that applies without a plan.
    """
    data_limit.set_up_heap(num_bytes)
    try:
        yield
    finally:
        has_budget = data_limit.budget_in_force_bytes() is not None
        data_limit.set_up_heap(heap.FAST_BYTES if has_budget else heap.USUAL_BYTES)


def is_built_apart(choices: Choices) -> bool:
    """Return whether a choice replaces the parameters of the new model by smaller shards before the first step."""
    techniques = [technique_of(choice.technique) for choice in choices]
    return any(one.is_for_the_run and "parameters" in one.moves for one in techniques)


def rules_in_force(choices: Choices, has_budget: bool) -> HeapRules:
    """Return the heap rules that apply to a training with these choices, with or without a budget."""
    rules = heap_rules(choices) or (FAST_HEAP if has_budget else DEFAULT_HEAP)
    if has_budget and is_built_apart(choices):
        return rules.model_copy(update={"build_threshold_bytes": heap.TIGHT_BYTES})
    return rules


def heap_rules(choices: Iterable[Choice]) -> HeapRules | None:
    """Return the heap rules that these choices set, or ``None`` if they set none."""
    found = (technique_of(choice.technique).heap_rules(choice) for choice in choices)
    return next((rules for rules in found if rules is not None), None)


def allocator_rules(choices: Iterable[Choice]) -> AllocatorRules:
    """Return the rules of torch's CUDA allocator under these choices and the settings in the environment.

    Raises:
        InputError: if the environment has a setting that torch does not know.
    """
    return rules_from_text(
        ",".join(filter(None, [allocator_settings.text_of(os.environ), *_allocator_settings(choices)]))
    )


def _allocator_settings(choices: Iterable[Choice]) -> list[str]:
    found = (technique_of(choice.technique).allocator_settings(choice) for choice in choices)
    return [settings for settings in found if settings]
