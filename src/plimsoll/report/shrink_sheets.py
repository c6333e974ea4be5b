"""Sheets and sentences of a model that was made smaller, shared by the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plimsoll.records.shrink import HOW_TO_LOAD, Quality, ShrinkRecord, Small
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.sheets import Sheet, columns_of

_NONE = "-"
_SLOW_SPEED = 0.5


def headline(record: ShrinkRecord) -> str:
    """Return a sentence on the chosen model, or on the number of models if none was chosen."""
    original = record.original
    if not record.is_complete:
        return (
            f"Stopped after {len(record.models) - 1} smaller versions of {record.model}, each measured on "
            f"{record.evaluated_on}: run the same command again to continue."
        )
    if record.best is None:
        return (
            f"{len(record.models) - 1} smaller versions of {record.model}, each measured on {record.evaluated_on}; "
            "none was chosen: give --target to choose one."
        )
    best = record.models[record.best]
    share = best.file_bytes / original.file_bytes
    return (
        f"{best.name}: {format_bytes(original.file_bytes)} -> {format_bytes(best.file_bytes)} ({share:.0%}), "
        f"{change_text(original.best_quality, best.best_quality)}{_trainings(original, best)}; written to "
        f"{record.output}.{_slowness(best)}"
    )


def _trainings(original: Small, best: Small) -> str:
    """Return a clause on the recovery training of the chosen model and the original; "" if the chosen had none."""
    if best.recovered is None:
        return ""
    steps = f"{best.recovery_steps:,} more steps"
    if original.recovered is None:
        return f" after {steps} (the original was not trained further and might improve too)"
    return f", both after {steps} if these helped"


def _slowness(small: Small) -> str:
    """Return a warning if inference is much slower than with the original model; "" otherwise.

    The search compares only size and quality, so it may choose a slow model.
    """
    if small.inference is None or small.inference.speed >= _SLOW_SPEED:
        return ""
    return (
        f" On this machine it takes {1 / small.inference.speed:.1f} times as long as the original: give --forbid to "
        "leave out a slow method."
    )


def change_text(before: Quality, after: Quality) -> str:
    """Return the change of quality as text: ``accuracy 90.0% -> 88.0%``."""
    name, write = _measure(before)
    return f"{name} {write(before)} -> {write(after)}"


def _measure(quality: Quality) -> tuple[str, Callable[[Quality], str]]:
    """Return the name of the quality measure that applies to a model, and a function that formats its value."""
    if quality.entity_f1 is not None:
        return "entity F1", lambda one: _percent(one.entity_f1)
    if quality.accuracy is not None:
        return "accuracy", lambda one: _percent(one.accuracy)
    if quality.similarity is not None:
        return "similarity", lambda one: f"{one.similarity:.4f}"
    return "perplexity", lambda one: f"{one.perplexity:,.1f}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def shrink_sheets(record: ShrinkRecord) -> tuple[Sheet, ...]:
    """Return the sheets on quality, inference, training, methods not tried, savings, and loading without Plimsoll."""
    return (
        _quality_sheet(record),
        _inference_sheet(record),
        _training_sheet(record),
        _unused_sheet(record),
        _saves_sheet(record),
        _loading_sheet(record),
    )


def _order(record: ShrinkRecord) -> list[int]:
    """Return the indices of the models in the record: the original first, then by quality, best first."""
    return [
        0,
        *sorted(range(1, len(record.models)), key=lambda one: record.models[one].best_quality.rank, reverse=True),
    ]


def _name(record: ShrinkRecord, number: int) -> str:
    mark = "* " if number == record.best else ""
    return f"{mark}{record.models[number].name}"


def _quality_sheet(record: ShrinkRecord) -> Sheet:
    measure, write = _measure(record.original.quality)
    has_recovered = any(model.recovered for model in record.models)
    front = set(record.front)
    columns = columns_of(
        "Model",
        "#Weights",
        "#Relative size",
        f"#{measure.capitalize()}",
        *["#Retrained"] * has_recovered,
        "Rejected because" if record.target_bytes is not None else "Pareto front",
    )
    rows = []
    for number in _order(record):
        model = record.models[number]
        row = [
            _name(record, number), format_bytes(model.file_bytes),
            f"{model.file_bytes / record.original.file_bytes:.0%}", write(model.quality),
        ]  # fmt: skip
        if has_recovered:
            row.append(write(model.recovered) if model.recovered else _NONE)
        row.append(
            (model.rejected or _NONE) if record.target_bytes is not None else "yes" if number in front else _NONE
        )
        rows.append(tuple(row))
    target = "" if record.target_bytes is None else f", target {format_bytes(record.target_bytes)}"
    return Sheet(f"Quality on {record.evaluated_on}{target}", tuple(columns), tuple(rows))


def _inference_sheet(record: ShrinkRecord) -> Sheet:
    known = [number for number in _order(record) if record.models[number].inference is not None]
    columns = columns_of("Model", "#Peak", "#Above baseline", "#Predicted", "#Rows/s", "#Speed")
    rows = []
    first = record.original.inference
    for number in known:
        cost = record.models[number].inference
        assert cost is not None
        rows.append(
            (
                _name(record, number),
                format_bytes(cost.peak_bytes),
                format_bytes(cost.peak_bytes - cost.baseline_bytes),
                format_bytes(cost.predicted.likely_bytes) if cost.predicted else "unknown",
                f"{1 / cost.row_seconds:,.0f}",
                f"x {cost.speed:.2f}",
            )
        )
    title = "Inference, measured in a separate process"
    if first is not None:
        title += f", up to {first.rows} rows of {first.longest_tokens} tokens"
    return Sheet(title, columns, tuple(rows))


def _training_sheet(record: ShrinkRecord) -> Sheet:
    columns = columns_of("Model", "#Predicted peak, whole batch", "#Peak", "#Step time", "Teacher")
    rows = []
    for number in _order(record):
        cost = record.models[number].training
        if cost is not None and (cost.predicted or cost.peak_bytes):
            rows.append(
                (
                    _name(record, number),
                    format_bytes(cost.predicted.likely_bytes) if cost.predicted else "unknown",
                    format_bytes(cost.peak_bytes) if cost.peak_bytes else _NONE,
                    format_seconds(cost.step_seconds) if cost.step_seconds else _NONE,
                    "included" if cost.has_teacher else "none",
                )
            )
    return Sheet("Training of the original, retraining of the others", columns, tuple(rows))


def _unused_sheet(record: ShrinkRecord) -> Sheet:
    rows = tuple((one.method, one.reason) for one in record.unused)
    return Sheet("Not used", columns_of("Method", "Reason"), rows)


def _saves_sheet(record: ShrinkRecord) -> Sheet:
    rows = tuple((name, text) for name, text in record.saves.items())
    return Sheet("Savings of each method", columns_of("Method", "Effect"), rows)


def _loading_sheet(record: ShrinkRecord) -> Sheet:
    if record.best is None:
        return Sheet("", (), ())
    best = record.models[record.best]
    return Sheet("Use without Plimsoll", columns_of("Folder", "Load with"), ((record.output, HOW_TO_LOAD[best.form]),))


def front_points(record: ShrinkRecord) -> Sequence[tuple[float, float, str, bool]]:
    """Return for each model its file bytes, its quality, its name, and whether it is Pareto-optimal."""
    front = set(record.front)
    return [
        (model.file_bytes, _number(model), model.name, number in front) for number, model in enumerate(record.models)
    ]


def _number(model: Small) -> float:
    quality = model.best_quality
    if quality.perplexity is not None:
        return quality.perplexity
    return 100 * quality.score if quality.similarity is None else quality.score


def measure_name(record: ShrinkRecord) -> str:
    """Return the axis title of the quality measure."""
    name, _ = _measure(record.original.quality)
    return f"{name}, %" if name in {"accuracy", "entity F1"} else name
