"""Sheets and sentences of a prediction, shared by the terminal and the HTML page.

The functions do not depend on colours, widths or HTML, and show only numbers from the record.

Does NOT give advice on how to free memory: see `plimsoll.diagnose`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.records.prediction import Answer, Estimate, Holding, Moment, Prediction, WhatIf
from plimsoll.records.trace import Assumption
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.sheets import Sheet, columns_of

DOES_NOT_FIT = "✗"  # readable without colours
WHAT_IF_TITLE = f"Peak by micro-batch and sequence length ({DOES_NOT_FIT} does not fit)"
_MOST_PATH_CHARACTERS = 40
_MOST_LARGEST = 10


@dataclass(frozen=True)
class Grid:
    """The what-if predictions as a table: a row per micro-batch and a cell per sequence length.

    A cell is ``None`` if its peak was not predicted.
    """

    sequence_lengths: tuple[int, ...]
    rows: tuple[tuple[int, tuple[WhatIf | None, ...]], ...]


def verdict_sentence(prediction: Prediction) -> str:
    """Return a sentence with the verdict, the peak, its range, and the largest micro-batch if the job does not fit."""
    peak, limit_bytes = prediction.peak, prediction.limit_bytes
    within = f" (range {range_text(peak)})" if peak.low_bytes < peak.high_bytes else ""
    sentence = (
        f"{prediction.verdict.capitalize()}: {format_bytes(peak.likely_bytes)} of {format_bytes(limit_bytes)}{within} "
        f"on {prediction.device}"
    )
    if prediction.fits:
        return f"{sentence}."
    if peak.likely_bytes > limit_bytes:
        sentence += f", {format_bytes(peak.likely_bytes - limit_bytes)} too much"
    else:
        sentence += ", but the allocator has no free block large enough for one request"
    return f"{sentence}{_what_fits(prediction)}."


def _what_fits(prediction: Prediction) -> str:
    answers = [answer for answer in prediction.answers if answer.question == "largest micro-batch"]
    if not answers:
        return ""
    if answers[0].value is None:
        return "; no micro-batch fits, not even 1"
    return f"; the largest micro-batch that fits is {_value_text(answers[0])}"


def moment_sentences(prediction: Prediction) -> tuple[str, ...]:
    """Return sentences on the moment of the peak, and the moment when memory runs out, if it does."""
    sentences = [f"The peak is in {moment_text(prediction.moment)}."]
    if prediction.runs_out_at is not None:
        sentences.append(f"Memory runs out in {moment_text(prediction.runs_out_at)}.")
    return tuple(sentences)


def moment_text(moment: Moment) -> str:
    """Format a moment: ``step 2, backward: aten::mm in h.0.mlp, at train.py:97``. Unknown parts are left out."""
    text = _phase_text(moment)
    if moment.op:
        text += f": {moment.op}"
    if moment.module:
        text += f" in {moment.module}"
    return f"{text}, at {short_path(moment.line)}" if moment.line else text


def _phase_text(moment: Moment) -> str:
    return f"step {moment.step:,}, {moment.phase}" if moment.step and moment.phase != "setup" else moment.phase


def short_path(line: str) -> str:
    """Shorten a long ``file:line`` by removing folders from the left. The file name and the line number always stay."""
    if len(line) <= _MOST_PATH_CHARACTERS:
        return line
    folders = line.replace("\\", "/").split("/")
    while len(folders) > 1 and len("…/" + "/".join(folders)) > _MOST_PATH_CHARACTERS:
        folders.pop(0)
    return "…/" + "/".join(folders)


def range_text(estimate: Estimate) -> str:
    """Format a range of sizes, with the unit once if both ends share it: ``9.5 to 10.1 GiB``."""
    low, high = format_bytes(estimate.low_bytes), format_bytes(estimate.high_bytes)
    if low == high:
        return high
    return f"{low.split()[0]} to {high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"


def share_text(num_bytes: int, whole_bytes: int) -> str:
    """Format a share in percent. Only exact values are written as 0 % or 100 %."""
    if whole_bytes <= 0:
        return "unknown"
    percent = 100 * num_bytes / whole_bytes
    if 0 < percent < 1:
        return "<1 %"
    return ">99 %" if 99 < percent < 100 else f"{percent:.0f} %"


def known_how(estimate: Estimate) -> str:
    """Return the sources of an estimate with their shares: ``96 % traced, 4 % modelled``."""
    named = {
        "traced": estimate.traced_bytes,
        "measured": estimate.measured_bytes,
        "modelled": estimate.modelled_bytes,
        "assumed": estimate.assumed_bytes,
    }
    shares = (f"{share_text(part, estimate.likely_bytes)} {name}" for name, part in named.items() if part)
    return ", ".join(shares) or "unknown"


def exchange_sentences(prediction: Prediction) -> tuple[str, ...]:
    """Return sentences on the data that each rank exchanges and the memory for it; empty for a single process."""
    exchange = prediction.exchange
    if exchange is None:
        return ()
    parts = [
        f"{doing} {format_bytes(num_bytes)} (largest tensor {format_bytes(largest)})"
        for doing, num_bytes, largest in (
            ("all-gathers parameters of", exchange.gathered_bytes, exchange.largest_gathered_bytes),
            ("reduce-scatters gradients of", exchange.scattered_bytes, exchange.largest_scattered_bytes),
            ("all-reduces gradients of", exchange.added_up_bytes, exchange.largest_added_up_bytes),
        )
        if num_bytes
    ]
    library = "gloo" if prediction.device_kind == "cpu" else "NCCL"
    kept = exchange.kept
    return (
        f"In each step, each of {exchange.num_ranks} ranks {', '.join(parts)}.",
        f"The peak includes {format_bytes(kept.likely_bytes)} for buffers of {library} (range {range_text(kept)}, "
        f"{known_how(kept)}).",
    )


def known_how_sentence(prediction: Prediction) -> str:
    """Return a sentence on the sources of the predicted peak."""
    return f"Sources of the peak: {known_how(prediction.peak)}."


def key_numbers(prediction: Prediction) -> tuple[tuple[str, str], ...]:
    """Return the key numbers of a prediction as pairs of label and value.

    The number of pairs is even, because reports show two pairs per row.
    """
    return (
        ("Micro-batch", _count(prediction.micro_batch)),
        ("Sequence length", _count(prediction.sequence_length)),
        ("Batch size", _count(prediction.batch_size)),
        ("Precision", prediction.precision),
        ("Limit", format_bytes(prediction.limit_bytes)),
        ("Limit from", prediction.limit_source),
        ("Device memory", format_bytes(prediction.capacity_bytes)),
        ("Predicted in", format_seconds(prediction.predict_seconds)),
    )


def estimate_sheet(prediction: Prediction) -> Sheet:
    """List the estimates of a prediction, such as the peak and the context, each with its range and its sources."""
    is_cpu = prediction.device_kind == "cpu"
    estimates = {
        "Peak (private memory)" if is_cpu else "Peak (on the device)": prediction.peak,
        "Reserved": prediction.reserved,
        "Allocated": prediction.allocated,
        "Baseline" if is_cpu else "Context": prediction.context,
        "Host": prediction.host,
    }
    rows = tuple(
        (name, format_bytes(estimate.likely_bytes), range_text(estimate), known_how(estimate))
        for name, estimate in estimates.items()
        if estimate is not None
    )
    return Sheet("Estimates", columns_of("Memory", "#Likely", "#Range", "Sources"), rows)


def part_sheet(prediction: Prediction) -> Sheet:
    """List the memory at the peak by category, largest first. The last row is the peak."""
    peak_bytes = prediction.peak.likely_bytes
    parts = sorted(prediction.parts.items(), key=lambda part: -part[1])
    rows: list[tuple[str, ...]] = [
        (name, format_bytes(part), share_text(part, peak_bytes)) for name, part in parts if part
    ]
    if rows:
        rows.append(("peak", format_bytes(peak_bytes), share_text(peak_bytes, peak_bytes)))
    return Sheet("At the peak", columns_of("Used for", "#Size", "#Share"), tuple(rows))


def largest_sheet(prediction: Prediction) -> Sheet:
    """List the largest live allocations at the peak, with the moment and source line of each."""
    columns = columns_of("#Size", "Used for", "Shape", "Allocated in", "Module", "Source line")
    return Sheet("Largest at the peak", columns, tuple(map(_holding_row, prediction.largest[:_MOST_LARGEST])))


def _holding_row(holding: Holding) -> tuple[str, ...]:
    made = holding.made
    return (
        format_bytes(holding.num_bytes),
        holding.category,
        (f"{holding.count} x " if holding.count > 1 else "") + (holding.shape or "unknown"),
        f"{_phase_text(made)}: {made.op}" if made.op else _phase_text(made),
        holding.name or made.module or "unknown",
        short_path(made.line) or "unknown",
    )


def answer_sheet(prediction: Prediction) -> Sheet:
    """List the results of the searches for the largest micro-batch, longest sequence and smallest device that fit."""
    rows = tuple(
        (answer.question.capitalize(), _value_text(answer), _peak_text(answer.peak)) for answer in prediction.answers
    )
    return Sheet(f"What fits in {format_bytes(prediction.limit_bytes)}", _ANSWER_COLUMNS, rows)


_ANSWER_COLUMNS = columns_of("Question", "Answer", "Peak")


def _value_text(answer: Answer) -> str:
    if answer.value is None:
        return "none"
    value = f"{answer.value:,}" if isinstance(answer.value, int) else answer.value
    return f"{value} or more" if answer.is_bound else value


def _peak_text(peak: Estimate | None) -> str:
    return "unknown" if peak is None else f"{format_bytes(peak.likely_bytes)} (range {range_text(peak)})"


def what_if_grid(prediction: Prediction) -> Grid:
    """Return the what-ifs arranged by micro-batch and sequence length."""
    found = {(what_if.micro_batch, what_if.sequence_length): what_if for what_if in prediction.what_ifs}
    lengths = tuple(sorted({length for _, length in found}))
    rows = tuple(
        (micro_batch, tuple(found.get((micro_batch, length)) for length in lengths))
        for micro_batch in sorted({micro_batch for micro_batch, _ in found})
    )
    return Grid(lengths, rows)


def what_if_sheets(prediction: Prediction, most_lengths: int) -> Iterator[Sheet]:
    """Yield the what-ifs as sheets without a title, with up to `most_lengths` sequence lengths each."""
    grid = what_if_grid(prediction)
    for start in range(0, len(grid.sequence_lengths), most_lengths):
        part = slice(start, start + most_lengths)
        rows = tuple((f"{micro_batch:,}", *map(what_if_text, cells[part])) for micro_batch, cells in grid.rows)
        yield Sheet("", columns_of("#Micro-batch", *(f"#{length:,}" for length in grid.sequence_lengths[part])), rows)


def what_if_text(what_if: WhatIf | None) -> str:
    """Format one cell of a `Grid`: the peak, with a mark if it does not fit; "" if it was not predicted."""
    if what_if is None:
        return ""
    return f"{'' if what_if.fits else DOES_NOT_FIT + ' '}{format_bytes(what_if.peak.likely_bytes)}"


def assumption_sheet(prediction: Prediction) -> Sheet:
    """List the assumptions of a prediction, and how far each widens the range of the peak."""
    rows = tuple((assumption.text, _difference_text(assumption)) for assumption in prediction.assumptions)
    return Sheet("Assumptions", columns_of("Assumption", "Effect on the range"), rows)


def _difference_text(assumption: Assumption) -> str:
    ends = sorted({assumption.low_bytes, assumption.high_bytes} - {0})
    said = [f"{format_bytes(abs(end))} {'less' if end < 0 else 'more'}" for end in ends]
    if not said:
        return "not counted"
    return " to ".join(said) if 0 not in (assumption.low_bytes, assumption.high_bytes) else f"up to {said[0]}"


def _count(number: int | None) -> str:
    return "set in code" if number is None else f"{number:,}"
