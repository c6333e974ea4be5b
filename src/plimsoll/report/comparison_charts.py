"""Charts of two runs: the peak of each step, the loss, and the predicted memory at the peak by category."""

from __future__ import annotations

import math

from plimsoll.records.run_comparison import RunComparison, RunSide
from plimsoll.records.units import format_bytes
from plimsoll.report.charts import Chart, Points, add_line, empty_figure, limit_line, thinned, unit_of
from plimsoll.report.comparison_sheets import labels

_COLOURS = ("var(--accent)", "var(--warning)")


def comparison_charts(comparison: RunComparison) -> tuple[Chart, ...]:
    """Return the charts of two runs, in the order of the page."""
    return peak_chart(comparison), loss_chart(comparison), category_chart(comparison)


def peak_chart(comparison: RunComparison) -> Chart:
    """Return the chart of the peak of each step in both runs, with the budgets."""
    title, sides = "Peak of each step", _sides(comparison)
    highest_bytes = [peak for _, side in sides for peak in side.peaks_bytes if peak is not None]
    if not highest_bytes:
        return Chart("peaks", title, "No memory was measured in a step of either run.", None)
    unit, unit_bytes = unit_of(max(highest_bytes))
    figure = empty_figure("step", unit)
    for (name, side), colour in zip(sides, _COLOURS, strict=True):
        rows = zip(side.steps, side.peaks_bytes, strict=True)
        points: Points = [(step, round(peak / unit_bytes, 4)) for step, peak in rows if peak is not None]
        add_line(figure, name, thinned(points), colour)
    budgets = {side.limit_bytes for _, side in sides if side.limit_bytes is not None}
    for limit_bytes in sorted(budgets):
        limit_line(figure, limit_bytes / unit_bytes, f"budget {format_bytes(limit_bytes)}")
    figure.update_yaxes(rangemode="tozero")
    return Chart("peaks", title, "The measured peak of each step.", figure.to_plotly_json())


def loss_chart(comparison: RunComparison) -> Chart:
    """Return the chart of the training loss of each step in both runs."""
    title, sides = "Loss", _sides(comparison)
    losses = [zip(side.steps, side.losses, strict=True) for _, side in sides]
    lines: list[Points] = [[(step, loss) for step, loss in own if math.isfinite(loss)] for own in losses]
    if not any(lines):
        return Chart("loss", title, "No step of either run has finished with a finite loss.", None)
    figure = empty_figure("step", "loss")
    for (name, _), points, colour in zip(sides, lines, _COLOURS, strict=True):
        add_line(figure, name, thinned(points), colour)
    num_left_out = sum(len(side.losses) for _, side in sides) - sum(map(len, lines))
    left_out = f" Not drawn, because not a finite number: {num_left_out:,} steps." if num_left_out else ""
    return Chart("loss", title, f"Training loss of each step.{left_out}", figure.to_plotly_json())


def category_chart(comparison: RunComparison) -> Chart:
    """Return the chart of the predicted memory at the peak, with a pair of bars per category."""
    title, sides = "At the peak, by category", _sides(comparison)
    if not comparison.first.parts or not comparison.second.parts:
        lacking = " and ".join(name for name, side in sides if not side.parts)
        return Chart("categories", title, f"No prediction for {lacking}.", None)
    most = {name: max(side.parts.get(name, 0) for _, side in sides) for _, own in sides for name in own.parts}
    names = sorted((name for name in most if most[name]), key=lambda name: -most[name])
    unit, unit_bytes = unit_of(max(most.values()))
    figure = empty_figure(unit, "")
    for (label, side), colour in zip(sides, _COLOURS, strict=True):
        figure.add_bar(
            name=label,
            orientation="h",
            y=names,
            x=[round(side.parts.get(name, 0) / unit_bytes, 4) for name in names],
            marker={"color": colour},
            hovertemplate=f"%{{x:,.4~g}} {unit}",
        )
    figure.update_layout(hovermode="y unified", bargap=0.3)
    figure.update_xaxes(showgrid=True)
    figure.update_yaxes(showgrid=False, autorange="reversed")
    return Chart("categories", title, "Predicted by the plan of each run for its first steps.", figure.to_plotly_json())


def _sides(comparison: RunComparison) -> list[tuple[str, RunSide]]:
    return [*zip(labels(comparison), (comparison.first, comparison.second), strict=True)]
