"""Graphs of earlier steps that are kept alive: by a hidden state that is not detached, or a list of outputs or losses.

Reported for a run if at least three marked graphs are alive and their number is not bounded. Reported for a live
process if memory has run out and a variable with graphs holds at least a twentieth of the training's memory. The oldest
operation of its graphs must be at least two finished steps old, or the variable must hold at least three graphs.

Not handled: only the last step's graph is kept, so memory does not grow; and memory that grows for any other reason.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.diagnose.causes.helpers.kept import finding_of_kept, much
from plimsoll.diagnose.evidence import Evidence, Kept
from plimsoll.records.diagnosis import GRAPH_IS_GONE, Fact, Finding, KnownHow
from plimsoll.records.run import RetainedGraph
from plimsoll.records.units import format_bytes

_CAUSE = "graph_kept"
_NODE_BYTES = 1024  # of host memory: 0.6 to 1.0 KiB after backward, torch 2.13 on CPU (`benchmarks/explain_growth.py`)
_FEWEST_ALIVE = 3
_WINDOW_SHARE = 1 / 2
_LEAST_SHARE = 0.05


class _Look(NamedTuple):
    """An observation of one variable or attribute (the holder) that keeps graphs alive.

    Attributes:
        step: the step after which it was observed.
        held: the tensors and graphs that it kept alive.
    """

    step: int
    held: RetainedGraph


class _Rates(NamedTuple):
    """Growth per step of the memory that one holder keeps. An unknown rate is ``None``.

    Attributes:
        tensor_bytes: bytes of the holder's tensors.
        graph_bytes: bytes that the graphs of these tensors save on the device.
        num_nodes: number of operations in these graphs.
    """

    tensor_bytes: float
    graph_bytes: float | None
    num_nodes: float | None


class _Each(NamedTuple):
    """Memory that the graph of each step keeps.

    Memory can grow by far more than was counted. Retained memory lies between freed blocks, whose pages the heap can
    neither return nor reuse for large blocks. For example, a GPT-2 of 12 small layers retains 0.7 MiB per step, but
    memory grows by 24 MiB per step. So the growth is an upper bound for the saving.

    Attributes:
        num_bytes: bytes per step; ``None`` if unknown.
        known: how ``num_bytes`` is known; ``None`` if it is not.
        high_bytes: the measured growth per step, an upper bound; ``None`` if it was not measured or is ``num_bytes``.
    """

    num_bytes: float | None
    known: KnownHow | None
    high_bytes: float | None


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Find the variables and attributes that keep graphs of earlier steps alive."""
    looks: dict[str, list[_Look]] = {}
    for line in evidence.graphs:
        for held in line.retained:
            looks.setdefault(held.holder, []).append(_Look(line.step, held))
    growing = [_finding(evidence, of_holder) for of_holder in looks.values() if _is_growing(evidence, of_holder)]
    ended = [_ended_by_it(evidence)] if GRAPH_IS_GONE in evidence.message else []
    return (*growing, *_in_a_live_process(evidence), *ended)


def _in_a_live_process(evidence: Evidence) -> list[Finding]:
    """Return findings for variables whose graphs reach back over several steps, or that collect many graphs."""
    if evidence.seen is None or evidence.seen.is_evaluating:
        return []
    return [
        _of_kept(evidence, kept)
        for kept in much(evidence, _LEAST_SHARE)
        if kept.num_graphs and (kept.num_steps_back >= _FEWEST_ALIVE - 1 or kept.num_graphs >= _FEWEST_ALIVE)
    ]


def _of_kept(evidence: Evidence, kept: Kept) -> Finding:
    is_state = kept.num_items < _FEWEST_ALIVE
    title = f"`{kept.name}` is not detached" if is_state else f"`{kept.name}` collects tensors with their graphs"
    back = f"their oldest operation is {kept.num_steps_back:,} finished steps old"
    return finding_of_kept(
        evidence,
        kept,
        _CAUSE,
        title=title,
        remedy=_remedy_of_kept(kept),
        code=kept.remedy if kept.graph_bytes >= kept.tensor_bytes else "",
        facts=[Fact(text=back, known="measured")],
    )


def _remedy_of_kept(kept: Kept) -> str:
    """Return the remedy for a variable that keeps graphs.

    If the tensors are larger than their graphs, detaching is not enough, and the remedy is to store less of each
    tensor.
    """
    if kept.tensor_bytes > kept.graph_bytes:
        return (
            f"keep a number of each (`.item()`) or only the part that is needed: `.detach()` frees the graphs, "
            f"{format_bytes(kept.graph_bytes)}, but not the tensors"
        )
    if kept.remedy:
        return f"keep it without its graph: in {kept.place} write the line below in place of `{kept.code}`"
    return f"keep it without its graph: add `.detach()` to the values that are put into `{kept.name}`"


def _ended_by_it(evidence: Evidence) -> Finding:
    """Return the finding for a run that failed because backward reached the graph of an earlier step.

    A hidden state was fed back without being detached. No memory is lost.
    """
    return Finding(
        cause=_CAUSE,
        title="hidden state not detached: backward reached the graph of an earlier step",
        evidence=(Fact(text=evidence.message, known="measured"),),
        remedy="detach the state before it is kept for the next step, as the message shows",
    )


def _is_growing(evidence: Evidence, looks: list[_Look]) -> bool:
    """Return whether the number of graphs that one holder keeps grows with the steps.

    It does not grow if the holder keeps only the last few graphs, as for a window over a constant number of steps.
    The graphs of some steps are marked to detect when they are freed. The number grows if no marked graph was freed.
    Otherwise three conditions must hold. All graphs that were marked after the oldest live graph are still alive. The
    live graphs reach back over half of the steps. The number of kept tensors grows.
    """
    last = looks[-1]
    alive, marked = last.held.alive_steps, last.held.marked_steps
    if len(alive) < _FEWEST_ALIVE or evidence.graphs[-1].step != last.step:
        return False
    if alive == marked:
        return True
    is_unbroken = set(alive) >= {step for step in marked if step >= alive[0]}
    is_long = last.step - alive[0] >= _WINDOW_SHARE * evidence.num_steps
    return is_unbroken and is_long and len(looks) > 1 and last.held.num_tensors > looks[-2].held.num_tensors


def _finding(evidence: Evidence, looks: list[_Look]) -> Finding:
    held, rates = looks[-1].held, _rates_of(looks)
    each = _each(evidence, held, rates)
    num_kept = evidence.last_step - held.alive_steps[0] + 1
    effect_bytes = None if each.num_bytes is None else round(each.num_bytes * num_kept)
    high_bytes = None if each.high_bytes is None else round(each.high_bytes * num_kept)
    by = f" by {format_bytes(round(each.num_bytes))} per step" if each.num_bytes is not None else " with every step"
    share = effect_bytes / evidence.peak_bytes if effect_bytes is not None and evidence.peak_bytes else None
    return Finding(
        cause=_CAUSE,
        title=f"{_what(held)}: graph grows{by}",
        place=held.place,
        evidence=tuple(_facts(evidence, held, rates)),
        peak_share=None if share is None else min(share, 1.0),
        remedy=_remedy(held),
        code=held.remedy,
        effect_bytes=effect_bytes,
        effect_known=each.known,
        effect_high_bytes=high_bytes if high_bytes is not None and high_bytes > (effect_bytes or 0) else None,
    )


def _what(held: RetainedGraph) -> str:
    if not held.holder:
        return "the losses of earlier steps are kept with their graphs"
    if _is_state(held):
        return f"hidden state not detached (`{held.holder}`)"
    return f"`{held.holder}` collects tensors with their graphs"


def _is_state(held: RetainedGraph) -> bool:
    """Return whether the holder is a state carried from step to step.

    A state has fewer tensors than graphs that are alive, because each tensor keeps the graphs of all earlier steps.
    """
    return held.num_tensors < len(held.alive_steps)


def _rates_of(looks: list[_Look]) -> _Rates:
    """Return the growth per step of a holder's sizes, each from its first to its last count in ``looks``."""

    def rate(points: list[tuple[int, int]]) -> float | None:
        if len(points) < 2:
            return None
        return max(0.0, (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))

    tensors = rate([(look.step, look.held.num_bytes) for look in looks])
    graphs = [(look.step, look.held.graph_bytes) for look in looks]
    nodes = [(look.step, look.held.num_nodes) for look in looks]
    return _Rates(
        tensors or 0.0,
        rate([(step, num) for step, num in graphs if num is not None]),
        rate([(step, num) for step, num in nodes if num is not None]),
    )


def _each(evidence: Evidence, held: RetainedGraph, rates: _Rates) -> _Each:
    """Return the memory that the graph of each step keeps, on the device whose peak is explained."""
    growth = evidence.growth
    measured = float(growth.likely_bytes) if growth is not None and growth.is_steady else None
    if not held.holder or rates.graph_bytes is None or rates.num_nodes is None:
        if rates.tensor_bytes:
            return _Each(rates.tensor_bytes, "counted", measured)
        return _Each(measured, "measured" if measured else None, None)
    counted = rates.tensor_bytes + rates.graph_bytes
    assumed = rates.num_nodes * _NODE_BYTES if evidence.kind == "cpu" else 0.0
    if measured and counted <= measured < counted + assumed:
        return _Each(measured, "measured", None)
    return _Each(counted + assumed, "counted" if counted >= assumed else "assumed", measured)


def _facts(evidence: Evidence, held: RetainedGraph, rates: _Rates) -> list[Fact]:
    alive = held.alive_steps
    facts = [
        Fact(
            text=f"after step {evidence.graphs[-1].step}, {len(alive)} of the {len(held.marked_steps)} marked graphs "
            f"of earlier steps are in memory, the first of step {alive[0]}",
            known="measured",
        )
    ]
    if held.holder:
        tensors = f"{held.num_tensors:,} tensor{'s' * (held.num_tensors != 1)}"
        facts.append(Fact(text=f"`{held.holder}` has {tensors}, {format_bytes(held.num_bytes)}", known="counted"))
    if rates.graph_bytes is not None:
        saved = f"the graph of a step still saves {format_bytes(round(rates.graph_bytes))}"
        facts.append(Fact(text=saved, known="counted"))
    if rates.num_nodes:
        nodes = f"{rates.num_nodes:,.0f} operations per step, each about 1 KiB of host memory"
        facts.append(Fact(text=nodes, known="assumed"))
    growth = evidence.growth
    if growth is not None and growth.is_steady:
        low, high = format_bytes(growth.low_bytes), format_bytes(growth.high_bytes)
        rate = f"{format_bytes(growth.likely_bytes)} per step ({low} to {high})"
        text = f"memory in use grows by {rate}, all causes together"
        facts.append(Fact(text=text, known="measured"))
    return facts


def _remedy(held: RetainedGraph) -> str:
    if held.remedy:
        return f"keep it without its graph: in {held.place} write the line below in place of `{held.code}`"
    if not held.holder:
        return "keep the losses without their graphs: write `losses.append(loss.detach())`, or `loss.item()`"
    if _is_state(held):
        return f"keep it without its graph: write `{held.holder} = {held.holder}.detach()` where it is assigned"
    return f"keep the tensors without their graphs: add `.detach()` to the values that are put into `{held.holder}`"
