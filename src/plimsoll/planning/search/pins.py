"""The user's constraints on a plan (``--pin`` and ``--forbid``), resolved to choices that techniques offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from plimsoll.errors import InputError
from plimsoll.models.workload import Workload
from plimsoll.records.plan import MICRO_BATCH, Choice, Pin, Value, check_pins, micro_batch_choice
from plimsoll.techniques import Choices, Setting, technique_of

_NOT_HERE = "it cannot be used here: "


class Decided(NamedTuple):
    """The user's constraints.

    ``pinned`` choices are in every plan. For a ``required`` technique, the planner chooses the options. ``left_out``
    has the pins that are impossible with this number of ranks, each with the reason. These pins apply again when a run
    resumes with enough processes.
    """

    pinned: Choices
    required: frozenset[str]
    forbidden: frozenset[str]
    left_out: Mapping[str, str] = MappingProxyType({})


def decide(pins: Sequence[Pin], forbids: Iterable[str], workload: Workload, setting: Setting) -> Decided:
    """Resolve pins and forbidden techniques.

    Raises:
        InputError: if a technique does not exist, is pinned twice in different ways, is pinned and forbidden, or cannot
            be used in this training with any number of ranks.
    """
    check_pins(pins, forbids)
    forbidden = frozenset(technique_of(name).name for name in forbids)
    pinned: list[Choice] = []
    required: list[str] = []
    left_out: dict[str, str] = {}
    for pin in pins:
        try:
            choice = _chosen(pin, workload, setting)
        except InputError as error:
            if not _is_possible_with_other_ranks(pin, workload, setting):
                raise
            reason = str(error).removeprefix(f"--pin {pin}: ").removeprefix(_NOT_HERE)
            left_out[str(pin)] = reason.partition("; leave it out")[0]
            continue
        if choice is None:
            required += [pin.technique] if pin.technique != MICRO_BATCH else []  # every plan has a micro-batch
        elif choice not in pinned:
            pinned.append(choice)
    return Decided(tuple(pinned), frozenset(required), forbidden, left_out)


def _is_possible_with_other_ranks(pin: Pin, workload: Workload, setting: Setting) -> bool:
    """Return whether a pin that is impossible here would be possible with another number of ranks."""
    if pin.technique == MICRO_BATCH and workload.kept_whole is not None:
        return False
    whole = setting.batch_size * setting.num_ranks
    for num_ranks in {1, 2} - {setting.num_ranks}:
        other = replace(setting, num_ranks=num_ranks, batch_size=max(1, whole // num_ranks))
        with suppress(InputError):
            _chosen(pin, workload, other)
            return True
    return False


def _chosen(pin: Pin, workload: Workload, setting: Setting) -> Choice | None:
    """Return the choice that a pin determines; ``None`` if the pin names no option and the technique offers several."""
    technique = technique_of(pin.technique)
    offered = technique.choices(workload, setting)
    if isinstance(offered, str):
        whole = micro_batch_choice(setting.batch_size)
        if pin.technique == whole.technique and whole.options["samples"] in {pin.value, pin.options.get("samples")}:
            return whole  # one micro-batch of the whole batch is always possible
        raise InputError(f"--pin {pin}: {_NOT_HERE}{offered}; leave it out")
    known = offered[0].options | dict(technique.unoffered)
    names = list(known)
    options = dict(pin.options)
    if pin.value is not None:
        if not names:
            raise InputError(f"--pin {pin}: {technique.name} has no options: write --pin {technique.name}")
        options = {names[0]: pin.value}
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise InputError(f"--pin {pin}: {technique.name} has no option `{unknown[0]}`: give one of {', '.join(names)}")
    options = {name: _as_offered(pin, name, value, known[name]) for name, value in options.items()}
    alike = [choice for choice in offered if known | choice.options == known | choice.options | options]
    choice = alike[0] if alike else Choice(technique=technique.name, options=offered[0].options | options)
    reason = technique.conflicts(choice, (), workload, setting)
    if reason is not None:
        raise InputError(f"--pin {pin}: {reason}; leave it out, or change the job")
    return choice if options or len(offered) == 1 else None


def _as_offered(pin: Pin, name: str, value: Value, offered: Value) -> Value:
    """Convert a pinned value to the type of the technique's option.

    For example, ``checkpointing=3`` becomes ``"3"`` if the option is a string.
    """
    if isinstance(offered, str):
        return str(value) if isinstance(value, int | float) else value
    if isinstance(value, bool) != isinstance(offered, bool) or not isinstance(value, int):
        kind = "true or false" if isinstance(offered, bool) else "a whole number"
        # A pin value without an option name belongs to the first option of the technique, which is never a bool.
        short, whole = f"{pin.technique}={_word(offered)}", f'"{pin.technique}({name}={_word(offered)})"'
        example = whole if isinstance(offered, bool) else short
        raise InputError(f"--pin {pin}: {name} is {_word(value)}: give {kind}, for example --pin {example}")
    return value


def _word(value: Value) -> str:
    return str(value).lower()
