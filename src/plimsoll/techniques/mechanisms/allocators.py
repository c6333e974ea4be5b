"""The heap of a process on a CPU and torch's CUDA allocator, as choices set them up: the set-up, and their rules."""

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
    """Set up what hands out memory in this process as it will be with these choices, before a model is built.

    What is built in another heap leaves holes where it moves: 11 MiB of a T5 of 376 whose parameters go to a file. So a
    model that is going to be shared out is built of mappings inside a budget; call `set_up_for_steps` when it is.
    """
    if device != "cpu":
        for settings in _allocator_settings(choices):
            allocator_settings.set_up(settings)
    elif is_built_apart(choices) and data_limit.budget_in_force_bytes() is not None:
        data_limit.set_up_heap(heap.TIGHT_BYTES)
    elif (rules := heap_rules(choices)) is not None:
        _set_up_heap(rules)


def set_up_for_steps(choices: Choices) -> None:
    """Set the heap up for the steps with these choices, where `set_up_as_with` has done otherwise for the model."""
    if is_built_apart(choices) and data_limit.budget_in_force_bytes() is not None:
        _set_up_heap(heap_rules(choices) or FAST_HEAP)


def _set_up_heap(rules: HeapRules) -> None:
    data_limit.set_up_heap(None if rules == KEPT_HEAP else rules.mmap_threshold_bytes)


@contextmanager
def blocks_mapped_from(num_bytes: int | None) -> Iterator[None]:
    """Set the threshold of this process, ``None`` for no mappings; the exit sets what is in force without a plan."""
    data_limit.set_up_heap(num_bytes)
    try:
        yield
    finally:
        has_budget = data_limit.budget_in_force_bytes() is not None
        data_limit.set_up_heap(heap.FAST_BYTES if has_budget else heap.USUAL_BYTES)


def is_built_apart(choices: Choices) -> bool:
    """Whether the parameters that a model is built with go before the first step, for smaller ones."""
    techniques = [technique_of(choice.technique) for choice in choices]
    return any(one.is_for_the_run and "parameters" in one.moves for one in techniques)


def rules_in_force(choices: Choices, has_budget: bool) -> HeapRules:
    """Return the rules of the heap of a training with these choices, inside a budget or without one."""
    rules = heap_rules(choices) or (FAST_HEAP if has_budget else DEFAULT_HEAP)
    if has_budget and is_built_apart(choices):
        return rules.model_copy(update={"build_threshold_bytes": heap.TIGHT_BYTES})
    return rules


def heap_rules(choices: Iterable[Choice]) -> HeapRules | None:
    """The rules of the heap with these choices; ``None`` where none of them sets it up."""
    found = (technique_of(choice.technique).heap_rules(choice) for choice in choices)
    return next((rules for rules in found if rules is not None), None)


def allocator_rules(choices: Iterable[Choice]) -> AllocatorRules:
    """The rules of torch's CUDA allocator with these choices, beside what the environment says.

    Raises:
        InputError: if the environment says what torch does not know.
    """
    return rules_from_text(
        ",".join(filter(None, [allocator_settings.text_of(os.environ), *_allocator_settings(choices)]))
    )


def _allocator_settings(choices: Iterable[Choice]) -> list[str]:
    found = (technique_of(choice.technique).allocator_settings(choice) for choice in choices)
    return [settings for settings in found if settings]
