"""Sheets and sentences of a plan, shared by the terminal and the HTML page.

The functions do not depend on colours, widths or HTML, and show only numbers from the record and differences between
them. The description of a technique comes from the record (``about``), because the technique modules import torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest

from plimsoll.records.device import Budget
from plimsoll.records.plan import MICRO_BATCH, Choice, Configuration, Duration, Plan, Rejected
from plimsoll.records.prediction import Estimate
from plimsoll.records.run import RunRecord
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.prediction_sheets import range_text
from plimsoll.report.sheets import Column, Sheet, columns_of, steps_of_plan

MOST_REJECTED = 12  # rows in the main table; the HTML page has more rows in a folded table
MOST_REJECTED_FOLDED = 200
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_LEAST_SAID_BYTES = 8 << 20  # less is small compared with the imported libraries
_BY_NUMBERS = "#Peak", "#Step time"


def verdict(plan: Plan) -> str:
    """Return in one or two words whether a plan fits: "probably fits" if the limit is in the range of the peak."""
    if not plan.fits:
        return "impossible"
    peak = plan.fallbacks[0].peak if plan.fallbacks else None
    if peak is None:
        return "not predicted"
    return "fits" if stays_under(peak, limit_bytes_of(plan)) else "probably fits"


def limit_bytes_of(plan: Plan) -> int | None:
    """Return the limit in bytes that peaks are compared with; ``None`` if the plan has no limit."""
    if plan.limit_bytes is not None:
        return plan.limit_bytes
    return plan.budget.device_bytes if plan.prediction is None else plan.prediction.limit_bytes


def stays_under(peak: Estimate, limit_bytes: int | None) -> bool:
    """Return whether the whole range of a peak is within a limit, or there is no limit."""
    return limit_bytes is None or peak.high_bytes <= limit_bytes


def headline(plan: Plan) -> str:
    """Return a sentence with the verdict, the memory and the step time of the plan."""
    if not plan.fits:
        return _impossible(plan)
    configuration = plan.fallbacks[0] if plan.fallbacks else Configuration(choices=())
    peak = configuration.peak
    if peak is None:
        return "Not predicted: training takes a fallback when memory runs out."
    limit_bytes = limit_bytes_of(plan)
    of = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    sentence = f"{verdict(plan).capitalize()}: {format_bytes(peak.likely_bytes)}{of}{_within(peak)}"
    return f"{sentence}{_on_device(plan)}{_about_seconds(configuration.step_time, plan.measured_seconds)}."


def _impossible(plan: Plan) -> str:
    needed_bytes, what, given_bytes = plan.smallest_budget_bytes or 0, "budget", plan.budget.device_bytes
    if given_bytes is None:
        what, given_bytes = "limit", limit_bytes_of(plan)
    sentence = f"Impossible: at least {format_bytes(needed_bytes)} is needed"
    if given_bytes is not None:
        short = format_bytes(max(0, needed_bytes - given_bytes))
        sentence += f", {short} more than the {what} of {format_bytes(given_bytes)}"
    capacity_bytes = plan.prediction.capacity_bytes if plan.prediction else None
    if capacity_bytes is not None and capacity_bytes < needed_bytes:
        return f"{sentence}{_on_device(plan)}, which has {format_bytes(capacity_bytes)}: choose a larger device."
    return f"{sentence}{_on_device(plan)}: give --budget {budget_word(needed_bytes)}."


def budget_word(num_bytes: int) -> str:
    """Round a size up to a short value for ``--budget``: ``1234KiB``, ``850MiB``, ``11.3GiB``."""
    if num_bytes < 10 * _MIB and num_bytes % _MIB:
        return f"{math.ceil(num_bytes / _KIB)}KiB"
    if num_bytes <= 10 * _GIB:
        return f"{math.ceil(num_bytes / _MIB)}MiB"
    return f"{math.ceil(10 * num_bytes / _GIB) / 10:g}GiB"


def _within(peak: Estimate) -> str:
    text = range_text(peak)
    return f" (range {text})" if text != format_bytes(peak.likely_bytes) else ""


def _on_device(plan: Plan) -> str:
    return f" on {plan.prediction.device}" if plan.prediction else ""


def _about_seconds(time: Duration | None, measured_seconds: float | None = None) -> str:
    if time is None:
        return ""
    predicted = format_seconds(time.likely_seconds)
    if measured_seconds is not None:
        return f", {format_seconds(measured_seconds)} per step measured, {predicted} predicted"
    return f", about {predicted} per step{_time_range(time)}"


def _time_range(time: Duration) -> str:
    text = seconds_range_text(time)
    return f" (range {text})" if text != format_seconds(time.likely_seconds) else ""


def seconds_range_text(time: Duration) -> str:
    """Format a range of times, with the unit once if both ends share it: ``1.5 to 2.4 s``."""
    low, high = format_seconds(time.low_seconds), format_seconds(time.high_seconds)
    if low == high:
        return high
    is_plain = len(low.split()) == len(high.split()) == 2 and low.split()[1] == high.split()[1]
    return f"{low.split()[0]} to {high}" if is_plain else f"{low} to {high}"


def plain_sentence(plan: Plan) -> str:
    """Return a sentence on the peak and step time without any technique, or "" if they were not predicted."""
    plain, limit_bytes = plan.plain, limit_bytes_of(plan)
    if plain is None or plain.peak is None:
        return ""
    if plan.fallbacks and _words(plan.fallbacks[0].choices) == _words(plain.choices):
        return "The plan needs no technique." if plan.fits else "The plan uses no technique."
    return f"Without techniques: {_compared(plain.peak, limit_bytes)}{_about_seconds(plain.step_time)}."


def alternative_sentence(plan: Plan) -> str:
    """Return a sentence on the first lossy alternative that fits, with the option that allows it; "" if none fits."""
    limit_bytes = limit_bytes_of(plan)
    for alternative in plan.lossy_alternatives:
        names = _lossy_names(plan, alternative.choices)
        if names and alternative.peak is not None and stays_under(alternative.peak, limit_bytes):
            allowed = ", ".join(names)
            return (
                f"It would fit with a technique that changes the training: "
                f"{format_bytes(alternative.peak.likely_bytes)} with --set 'allow=[{allowed}]'."
            )
    return ""


def constraints_sentence(plan: Plan) -> str:
    """Return the pinned, left out and forbidden choices as sentences, or "" if there are no constraints."""
    said = []
    if plan.pinned:
        said.append(f"Pinned: {', '.join(map(str, plan.pinned))}.")
    said += [f"Left out: {pin}, because {reason}." for pin, reason in plan.left_out.items()]
    if plan.forbidden:
        said.append(f"Forbidden: {', '.join(plan.forbidden)}.")
    return " ".join(said)


def loss_sentence(plan: Plan) -> str:
    """Return a sentence on whether the batch may be split into micro-batches.

    The sentence is "" if the kind of loss function is enough to decide, or if no check was made.
    """
    check = plan.loss_check
    if check is None or check.verdict == "known":
        return ""
    if check.may_cut:
        return f"Loss of micro-batches: {check.sentence}."
    return f"The batch is not split into micro-batches: {check.why} ({check.remedy})."


def trial_sentence(plan: Plan) -> str:
    """Return a sentence on the trial of the plan, or "" if no configuration fits or was predicted."""
    trial, num_others = plan.trial, len(plan.candidates)
    if not plan.fits or (trial is None and plan.prediction is None):
        return ""
    if trial is None and num_others:
        others = "one other plan" if num_others == 1 else f"{num_others} other plans"
        return (
            f"No trial yet: `plimsoll train` first times this plan and {others} of about the same speed on the device, "
            "and takes the fastest."
        )
    if trial is None:
        return "No trial: no other traced plan is about as fast."
    if trial.left_out:
        return f"No trial: {trial.left_out}."
    fastest = next((one for one in trial.tried if one.outcome == "fastest"), None)
    if fastest is None:
        return f"Trial: none of {len(trial.tried)} plans passed, so training starts with a fallback."
    num_measured = sum(one.measured_seconds is not None for one in trial.tried)
    of = f"the fastest of {num_measured} plans" if num_measured > 1 else "the only candidate that was measured"
    return (
        f"Trial: {choices_text(fastest.choices)} is {of}, {format_seconds(fastest.measured_seconds)} per step. "
        f"The trial took {format_seconds(trial.seconds)}."
    )


def trial_sheet(plan: Plan) -> Sheet:
    """List the candidates of a trial with predicted and measured step times."""
    columns = columns_of("Choices", "#Predicted", "#Measured", "Result", "Reason")
    rows = tuple(
        (
            choices_text(one.choices),
            format_seconds(one.predicted_seconds),
            "" if one.measured_seconds is None else format_seconds(one.measured_seconds),
            one.outcome,
            one.why,
        )
        for one in (plan.trial.tried if plan.trial is not None else ())
    )
    return Sheet("Step times in the trial", columns, rows)


def preparing_sentence(plan: Plan) -> str:
    """Return a sentence on the memory for training the tokenizer, or "" if it is not trained or needs little memory."""
    if plan.tokenizer_bytes is None or plan.tokenizer_bytes < _LEAST_SAID_BYTES:
        return ""
    return f"Data preparation trains a tokenizer and needs up to {format_bytes(plan.tokenizer_bytes)} for it."


def off_device_sentence(plan: Plan) -> str:
    """Return sentences on parameters kept outside the budget and the bytes moved per step, or "" if all are inside."""
    off = plan.off_device
    if off is None:
        return ""
    is_cpu = plan.prediction is None or plan.prediction.device_kind == "cpu"
    where = "kept in files on disk" if is_cpu else "offloaded to host memory"
    sentence = f"Outside the budget, {format_bytes(off.kept_bytes)} is {where}; each step reads and writes "
    sentence += f"{format_bytes(off.moved_bytes)} there"
    if not is_cpu:
        return f"{sentence}."
    if off.disk_bytes_per_second is None:
        return f"{sentence}, in the page cache while the machine has enough free memory."
    return (
        f"{sentence}. The files do not fit in the machine's memory, so every step waits for the disk, at "
        f"{format_bytes(int(off.disk_bytes_per_second))}/s."
    )


def budget_sentence(budget: Budget) -> str:
    """Return a sentence with the budget of device and host. Without a budget, the limits of the machine apply."""
    named = {"device": budget.device_bytes, "host": budget.host_bytes}
    given = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in named.items() if num_bytes is not None]
    return f"Budget: {', '.join(given)}." if given else "No budget was set: the limit is the memory of the machine."


def key_numbers(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return the key numbers of a plan as pairs of label and value.

    The number of pairs is even, because reports show two pairs per row.
    """
    prediction = plan.prediction
    if prediction is None:
        return ()
    batch_size, micro_batch = prediction.batch_size, prediction.micro_batch
    return (
        ("Batch size", "set in code" if batch_size is None else f"{batch_size:,}"),
        ("Micro-batch", "set in code" if micro_batch is None else f"{micro_batch:,}"),
        ("Limit from", prediction.limit_source),
        ("Device memory", format_bytes(prediction.capacity_bytes)),
        ("Plans traced", f"{plan.num_traces:,}"),
        ("Planned in", format_seconds(plan.plan_seconds)),
    )


def choices_text(choices: Sequence[Choice]) -> str:
    """Format choices in order of installation, as on the command line: ``micro_batch=16 + checkpointing=all``."""
    return " + ".join(map(str, choices)) or "no technique"


def chosen_sheet(plan: Plan) -> Sheet:
    """List the techniques of the plan in order of installation, with the effect of each and the reason for it.

    The sheet has no rows if the record describes no technique: the fallback sheet lists them anyway.
    """
    columns = columns_of("Technique", "Numerics", "Effect", "Reason")
    choices = plan.fallbacks[0].choices if plan.fallbacks else ()
    rows = tuple(
        (str(choice), plan.numerics.get(choice.technique, ""), plan.about.get(choice.technique, ""), _why(plan, choice))
        for choice in choices
    )
    if not any(any(row[1:]) for row in rows):
        rows = ()
    return Sheet("Techniques of the plan" if plan.fits else "Combination with the lowest peak", columns, rows)


def _why(plan: Plan, choice: Choice) -> str:
    said = "Pinned. " if choice in plan.pinned else ""
    why = plan.why.get(choice.technique) or _without(plan, choice)
    return (said + why[:1].upper() + why[1:]).strip()


def _without(plan: Plan, choice: Choice) -> str:
    """Return as text the predicted peak and step time of the plan without ``choice``, or "" if it was not predicted."""
    others = _words(other for other in plan.fallbacks[0].choices if other.technique != choice.technique)
    looked_at: list[Rejected | Configuration] = [
        *plan.rejected,
        *plan.fallbacks[1:],
        *([plan.plain] if plan.plain else []),
    ]
    whole = _words(plan.plain.choices) if plan.plain else set()
    for found in looked_at:
        same = _words(found.choices)
        if found.peak is not None and (same == others or (choice.technique == MICRO_BATCH and same == others | whole)):
            return f"without it: {_compared(found.peak, limit_bytes_of(plan))}{_about_seconds(found.step_time)}"
    return ""


def _words(choices: Iterable[Choice]) -> set[str]:
    return set(map(str, choices))


def _compared(peak: Estimate, limit_bytes: int | None) -> str:
    text = format_bytes(peak.likely_bytes)
    if limit_bytes is None or peak.high_bytes <= limit_bytes:
        return text
    if peak.likely_bytes <= limit_bytes:
        return f"{text}, up to {format_bytes(peak.high_bytes - limit_bytes)} too much"
    return f"{text}, {format_bytes(peak.likely_bytes - limit_bytes)} too much"


def fallback_sheet(plan: Plan) -> Sheet:
    """List the plan and its fallbacks in order of use, with predicted peaks and step times if there are any."""
    is_predicted = any(configuration.peak or configuration.step_time for configuration in plan.fallbacks)
    rows = tuple(
        (
            _fallback_name(index, plan),
            choices_text(configuration.choices),
            *(_numbers(configuration) if is_predicted else ()),
        )
        for index, configuration in enumerate(plan.fallbacks)
    )
    columns = columns_of("Order", "Choices", *(_BY_NUMBERS if is_predicted else ()))
    return Sheet("Plan and fallbacks", columns, rows)


def _numbers(found: Configuration | Rejected) -> tuple[str, str]:
    """Return peak and step time as text, both empty for a rejected combination that cannot run."""
    peak, time = found.peak, found.step_time
    if isinstance(found, Rejected) and peak is None and time is None:
        return "", ""
    return (
        format_bytes(None if peak is None else peak.likely_bytes),
        format_seconds(None if time is None else time.likely_seconds),
    )


def _fallback_name(index: int, plan: Plan) -> str:
    if index:
        return f"fallback {index}"
    return "plan" if plan.fits else "lowest peak"


def plan_in_force_sheet(record: RunRecord) -> Sheet:
    """List the plan of a run and its fallbacks, each with its number of steps since the last start or resume."""
    sheet, steps = fallback_sheet(record.plan), steps_of_plan(record)
    steps_at = Counter(line.fallback for line in steps)
    rows = tuple((*row, f"{steps_at[index]:,}") for index, row in enumerate(sheet.rows))
    is_whole = len(steps) == len(record.finished_steps)
    title = "Steps run" if is_whole else f"Last {len(steps):,} steps"
    return Sheet(sheet.title, (*sheet.columns, Column(title, True)), rows)


def rejected_sheet(plan: Plan, most_rows: int) -> Sheet:
    """List up to ``most_rows`` rejected combinations.

    Combinations that fit come first, by step time; then those too large, by peak; then those without a prediction.
    """
    shown = _most_telling(plan, most_rows)
    rows = tuple((choices_text(found.choices), *_numbers(found), found.reason) for found in shown)
    title = "Rejected" if len(shown) == len(plan.rejected) else f"Rejected, {len(shown)} of {len(plan.rejected):,}"
    return Sheet(title, columns_of("Choices", *_BY_NUMBERS, "Reason"), rows)


def _most_telling(plan: Plan, most_rows: int) -> list[Rejected]:
    """Return up to ``most_rows`` rejected combinations that differ as much as possible.

    They are taken in turn from three lists: fitting, too large, and not predicted. In each list, combinations with
    other techniques are taken before combinations that differ only in options.
    """
    limit_bytes = limit_bytes_of(plan)
    fitting = _sorted(plan.rejected, lambda peak: stays_under(peak, limit_bytes), _seconds_of)
    too_large = _sorted(plan.rejected, lambda peak: not stays_under(peak, limit_bytes), _bytes_of)
    unknown = [found for found in plan.rejected if found.peak is None]
    kinds = (fitting, too_large, unknown)
    in_turn = chain(*zip_longest(*map(_unlike_first, kinds)))
    kept = {id(found) for found in [found for found in in_turn if found is not None][:most_rows]}
    return [found for kind in kinds for found in kind if id(found) in kept]


def _unlike_first(kind: Sequence[Rejected]) -> list[Rejected]:
    """Sort combinations so that the first combination of each set of techniques precedes all others."""
    first: dict[frozenset[str], Rejected] = {}
    for found in kind:
        first.setdefault(frozenset(choice.technique for choice in found.choices), found)
    firsts = {id(found) for found in first.values()}
    return [*first.values(), *(found for found in kind if id(found) not in firsts)]


def _sorted(
    rejected: Iterable[Rejected], is_kept: Callable[[Estimate], bool], key: Callable[[Rejected], float]
) -> list[Rejected]:
    return sorted((found for found in rejected if found.peak is not None and is_kept(found.peak)), key=key)


def _seconds_of(found: Rejected) -> float:
    return math.inf if found.step_time is None else found.step_time.likely_seconds


def _bytes_of(found: Rejected) -> float:
    return math.inf if found.peak is None else found.peak.high_bytes


def alternative_sheet(plan: Plan) -> Sheet:
    """List combinations with techniques that change the training, and the techniques that a job must allow for each."""
    rows = tuple(
        (
            ", ".join(_lossy_names(plan, alternative.choices)),
            choices_text(alternative.choices),
            *_numbers(alternative),
            alternative.reason,
        )
        for alternative in plan.lossy_alternatives
    )
    columns = columns_of("Allow", "Choices", *_BY_NUMBERS, "Result")
    return Sheet("Lossy alternatives, which are not allowed", columns, rows)


def _lossy_names(plan: Plan, choices: Sequence[Choice]) -> list[str]:
    return [choice.technique for choice in choices if plan.numerics.get(choice.technique) == "lossy"]


def made_for_sheet(plan: Plan) -> Sheet:
    """List the facts, such as the version of torch, that must be unchanged for the plan to be valid."""
    return Sheet("Valid for", columns_of("Fact", "Value"), tuple(plan.made_for.items()))
