"""Chart of smaller models: quality against the size of the weights, with the Pareto front.

The target is a vertical line; models left of it are small enough.
"""

from __future__ import annotations

from plimsoll.records.shrink import ShrinkRecord
from plimsoll.records.units import format_bytes
from plimsoll.report.charts import Chart, empty_figure, unit_of
from plimsoll.report.shrink_sheets import front_points, measure_name

_MOST_LABELS = 8  # more would overlap


def front_chart(record: ShrinkRecord) -> Chart:
    """Return the chart of all models, with a line through the Pareto-optimal models."""
    title = "Quality and size"
    points = front_points(record)
    unit, unit_bytes = unit_of(max(int(point[0]) for point in points))
    figure = empty_figure(f"weights, {unit}", measure_name(record))
    front = sorted(point for point in points if point[3])
    others = [point for point in points if not point[3]]
    for name, group, colour, mode in (
        ("Pareto front", front, "var(--accent)", "lines+markers+text"),
        ("others", others, "var(--second)", "markers"),
    ):
        if group:
            figure.add_scatter(
                name=name,
                x=[round(point[0] / unit_bytes, 4) for point in group],
                y=[round(point[1], 4) for point in group],
                text=[point[2] for point in group],
                mode=mode if len(group) <= _MOST_LABELS or mode == "markers" else "lines+markers",
                textposition="top center",
                line={"color": colour, "width": 1.6},
                marker={"color": colour, "size": 8},
                hovertemplate="%{text}: %{x:,.4~g}, %{y:,.4~g}",
            )
    if record.target_bytes is not None:
        figure.add_vline(
            x=record.target_bytes / unit_bytes, line={"color": "var(--line)", "width": 1.6, "dash": "dash"}
        )
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(showgrid=True, rangemode="tozero")
    target = "" if record.target_bytes is None else f" The target is {format_bytes(record.target_bytes)}."
    best = "Lower" if record.original.quality.is_language_model else "Higher"
    caption = f"Measured for {len(points):,} models, after retraining if it helped. {best} is better.{target}"
    return Chart("front", title, caption, figure.to_plotly_json())
