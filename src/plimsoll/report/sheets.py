"""Sheets (tables of finished text) and sentences of a run or device, shared by the terminal and the HTML page.

The functions do not depend on colours, widths or HTML, and show only numbers from the record. A number that was not
measured is "unknown" or "none".

Does NOT explain why memory was used or how to free it: see `plimsoll.diagnose`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.records.device import Device, Machine
from plimsoll.records.run import OomEvent, RunRecord, StepLine
from plimsoll.records.units import format_bytes, format_seconds

_MOST_STEP_ROWS = 20  # short enough to read; the charts show every step


@dataclass(frozen=True)
class Column:
    """One column of a sheet. Numbers are right-aligned."""

    title: str
    is_number: bool = False


def columns_of(*titles: str) -> tuple[Column, ...]:
    """Return columns with the given titles. A title that begins with ``#`` marks a column of numbers."""
    return tuple(Column(title.removeprefix("#"), title.startswith("#")) for title in titles)


FACTS = columns_of("Property", "Value")


@dataclass(frozen=True)
class Sheet:
    """A titled table of finished text. ``folded`` holds a long text for each row, which only the HTML page shows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: tuple[str, ...] = ()

    @property
    def is_prose(self) -> bool:
        """True if the sheet is too wide for a phone: three text columns, or two with at least two number columns."""
        num_words = sum(not column.is_number for column in self.columns)
        return num_words > 2 or (num_words == 2 and len(self.columns) > 3)


def steps_of_plan(record: RunRecord) -> tuple[StepLine, ...]:
    """Return the finished steps since the run was last started or resumed. Earlier steps may have had another plan."""
    begun_at = next((start.step for start in reversed(record.starts) if start.restarts == 0), 0)
    return tuple(line for line in record.finished_steps if line.step > begun_at)


def used_name(device: Device) -> str:
    """Return the name of the memory that is measured on a device: private memory (CPU) or allocated memory (CUDA)."""
    return "private memory" if device.kind == "cpu" else "allocated memory"


def format_loss(loss: float) -> str:
    """Format a loss with four significant digits, or as ``NaN``, ``infinite`` or ``-infinite``."""
    return f"{loss:#.4g}" if math.isfinite(loss) else {"nan": "NaN", "inf": "infinite", "-inf": "-infinite"}[str(loss)]


def step_speed(line: StepLine) -> float | None:
    """Return the samples or tokens per second of one step, or ``None`` if the step took less than a clock tick."""
    return line.num_units / line.step_seconds if line.step_seconds else None


def format_speed(units_per_second: float | None, unit_name: str) -> str:
    """Format a speed: ``"12,345 tokens/s"``."""
    return "unknown" if units_per_second is None else f"{units_per_second:,.0f} {unit_name}/s"


def line_sentence(record: RunRecord) -> str:
    """Return a sentence that compares the peak of the run with its budget."""
    peak_bytes, limit_bytes = record.peak_bytes, record.limit_bytes
    if limit_bytes is None:
        return f"Peak {format_bytes(peak_bytes)}; no budget was set."
    if peak_bytes is None:
        return f"No memory was measured; the budget is {format_bytes(limit_bytes)}."
    # Rounded down, so that a run just below its budget is not shown at 100 %.
    share = (
        f"Peak {format_bytes(peak_bytes)} of a {format_bytes(limit_bytes)} budget ({100 * peak_bytes // limit_bytes} %)"
    )
    if peak_bytes > limit_bytes:
        return f"{share}: the run went over budget by {format_bytes(peak_bytes - limit_bytes)}."
    return f"{share}: the run stayed within budget."


def key_numbers(record: RunRecord) -> tuple[tuple[str, str], ...]:
    """Return the key numbers of a run as pairs of label and value."""
    steps = record.finished_steps
    num_steps_asked = record.job.get("steps")
    return (
        ("Steps", f"{len(steps):,} of {num_steps_asked:,}" if num_steps_asked else f"{len(steps):,}"),
        ("Throughput", format_speed(record.units_per_second, record.unit_name)),
        ("Time to last step", format_seconds(steps[-1].time_seconds) if steps else "none"),
        ("Micro-batch", _micro_batch_in_force(record)),
        ("First loss", format_loss(steps[0].loss) if steps else "none"),
        ("Last loss", format_loss(steps[-1].loss) if steps else "none"),
        ("Validation loss", _last_evaluation(record)),
        ("Last checkpoint", f"step {record.checkpoints[-1].step:,}" if record.checkpoints else "none"),
        ("Peak memory", format_bytes(record.peak_bytes)),
        *_ranks(record),
        ("Budget", "none" if record.limit_bytes is None else format_bytes(record.limit_bytes)),
        ("OOM events", _survived(record)),
        ("Restarts", str(sum(death.restarted_from_step is not None for death in record.deaths))),
        *_reach(record),
        *_loss_in_parts(record),
        *_preparation(record),
        *_predicted(record, steps_of_plan(record)),
    )


def _ranks(record: RunRecord) -> tuple[tuple[str, str], ...]:
    peaks = record.peak_bytes_of_ranks
    if not peaks:
        return ()
    least, most = min(peaks), max(peaks)
    of_one, of_other = (f"{format_bytes(peak)} (rank {peaks.index(peak)})" for peak in (least, most))
    return (("Ranks", f"{len(peaks)}"), ("Peak per rank", f"{of_one} to {of_other}"))


def _preparation(record: RunRecord) -> tuple[tuple[str, str], ...]:
    if record.preparation_bytes is None:
        return ()
    return (("Preparation peak", format_bytes(record.preparation_bytes)),)


def _reach(record: RunRecord) -> tuple[tuple[str, str], ...]:
    reach = record.gradient_reach
    if reach is None:
        return ()
    return (
        ("Gradient reach", f"at most {reach.most_tokens:,} token{'s' * (reach.most_tokens != 1)}"),
        ("Mean gradient reach", f"{reach.mean_tokens:,.1f} tokens"),
    )


def _loss_in_parts(record: RunRecord) -> tuple[tuple[str, str], ...]:
    if not record.losses or record.losses[-1].check.verdict == "known":
        return ()
    line = record.losses[-1]
    checked = (
        f"{line.check.num_samples} samples, before step {line.step:,}" if line.check.num_samples else "not computed"
    )
    return (("Micro-batch loss", line.check.verdict), ("Compared", checked))


def _predicted(record: RunRecord, steps: Sequence[StepLine]) -> tuple[tuple[str, str], ...]:
    """Return the predicted peak and step time of the plan, and the measured mean step time without the first step."""
    configuration = record.plan.fallbacks[0] if record.plan.fallbacks else None
    if configuration is None or configuration.peak is None or configuration.step_time is None:
        return ()
    seconds = [line.step_seconds for line in steps[1:] if line.fallback == 0]
    measured = f", measured {format_seconds(sum(seconds) / len(seconds))}" if seconds else ""
    return (
        ("Predicted peak", format_bytes(configuration.peak.likely_bytes)),
        ("Predicted step time", f"{format_seconds(configuration.step_time.likely_seconds)}{measured}"),
    )


def _micro_batch_in_force(record: RunRecord) -> str:
    sizes = [start.micro_batch for start in record.starts[:1]] + [line.micro_batch for line in record.finished_steps]
    if not sizes:
        return "not started"
    return f"{sizes[0]:,} throughout" if len(set(sizes)) == 1 else f"{sizes[0]:,} at start, {sizes[-1]:,} at end"


def _last_evaluation(record: RunRecord) -> str:
    if not record.evaluations:
        return "none"
    last = record.evaluations[-1]
    accuracy = "" if last.accuracy is None else f", accuracy {last.accuracy:.1%}"
    entities = "" if last.entity_f1 is None else f", entity F1 {last.entity_f1:.1%}"
    return f"{format_loss(last.loss)} at step {last.step:,}{accuracy}{entities}"


def _survived(record: RunRecord) -> str:
    num_events = len(record.oom_events)
    num_survived = sum(event.survived for event in record.oom_events)
    if num_events == 0:
        return "none"
    return f"{num_events}, all survived" if num_survived == num_events else f"{num_events}, {num_survived} survived"


def oom_sheet(events: Sequence[OomEvent]) -> Sheet:
    """List the out-of-memory errors and the action taken after each."""
    columns = columns_of("#Step", "Phase", "Error", "#Requested", "#In use", "Action")
    rows = tuple(
        (
            "none" if event.step is None else f"{event.step:,}",
            event.phase or "unknown",
            event.family + _place_of(event),
            format_bytes(event.requested_bytes),
            format_bytes(event.live_bytes),
            event.action or "none",
        )
        for event in events
    )
    return Sheet("Out-of-memory events", columns, rows, tuple(event.raw_text for event in events))


def _place_of(event: OomEvent) -> str:
    """Return the rank on which memory ran out, such as ``, rank 1``, or "" if there is only one rank."""
    others = f" and {event.num_other_ranks} more" if event.num_other_ranks else ""
    return "" if event.rank is None else f", rank {event.rank}{others}"


def death_sheet(record: RunRecord) -> Sheet:
    """List the times when the training process was killed, with evidence from the machine."""
    rows = tuple(
        (
            format_seconds(death.time_seconds),
            death.signal,
            death.evidence,
            "not restarted"
            if death.restarted_from_step is None
            else f"restarted from step {death.restarted_from_step:,}",
        )
        for death in record.deaths
    )
    return Sheet("Killed processes", columns_of("#Time", "Signal", "Evidence", "Outcome"), rows)


def checkpoint_sheet(record: RunRecord) -> Sheet:
    """List the complete checkpoints."""
    rows = tuple(
        (f"{line.step:,}", format_seconds(line.time_seconds), format_bytes(line.num_bytes))
        for line in record.checkpoints
    )
    return Sheet(f"Checkpoints, {len(rows):,}", columns_of("#Step", "#Time", "#Size"), rows)


def step_sheet(record: RunRecord) -> Sheet:
    """List about twenty evenly spaced steps, always with the first and the last."""
    steps = record.finished_steps
    stride = -(-len(steps) // _MOST_STEP_ROWS) or 1
    shown = [*steps[:-1:stride], *steps[-1:]]
    units = f"#{record.unit_name.capitalize()}"
    columns = columns_of("#Step", "#Loss", "#Learning rate", "#Step time", units, "#Micro-batch", "#Peak")
    rows = tuple(
        (
            f"{line.step:,}",
            format_loss(line.loss),
            f"{line.learning_rate:.3g}",
            format_seconds(line.step_seconds),
            f"{line.num_units:,.10g}",
            f"{line.micro_batch:,}",
            format_bytes(line.peak_bytes),
        )
        for line in shown
    )
    return Sheet(f"Steps, {len(shown)} of {len(steps):,}", columns, rows)


def device_sheet(device: Device) -> Sheet:
    """Describe one device: memory, limits and use."""
    facts = [
        ("Name", device.name),
        ("Usable", f"{format_bytes(device.capacity_bytes)}, limited by {_bound(device)}"),
        ("Free", format_bytes(device.free_bytes)),
        ("Hardware", format_bytes(device.hardware_bytes)),
        *((f"Limit: {limit.source}", format_bytes(limit.bytes)) for limit in device.limits),
        ("Used by this process", f"{format_bytes(device.use.used_bytes)}, peak {format_bytes(device.use.peak_bytes)}"),
        ("Used by other processes", format_bytes(device.use.others_bytes)),
        *([("Cores", str(device.num_cores))] if device.num_cores else []),
        *([("Architecture", device.architecture)] if device.architecture else []),
        *(("Note", note) for note in device.notes),
    ]
    return Sheet(f"Device {_place(device)}", FACTS, tuple(facts))


def machine_sheet(machine: Machine) -> Sheet:
    """List every device with its usable and free memory, and the source of its limit."""
    columns = columns_of("Device", "Name", "#Usable", "#Free", "Limited by")
    rows = tuple(
        (
            _place(device),
            device.name,
            format_bytes(device.capacity_bytes),
            format_bytes(device.free_bytes),
            _bound(device),
        )
        for device in machine.devices
    )
    return Sheet("Devices", columns, rows)


def version_sheet(versions: dict[str, str]) -> Sheet:
    """List the libraries and their versions."""
    return Sheet("Versions", columns_of("Library", "Version"), tuple(sorted(versions.items())))


def _place(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else f"{device.kind}:{device.index}"


def _bound(device: Device) -> str:
    """Return the source of a device's capacity: the limit that equals the capacity, or the hardware."""
    return next((limit.source for limit in device.limits if limit.bytes == device.capacity_bytes), "hardware")
