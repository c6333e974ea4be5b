"""Chart of a plan: every predicted configuration by peak and step time.

The limit is a vertical line; configurations left of it fit. Configurations without a predicted peak and step time are
missing. The caption gives the number of points.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from plimsoll.records.plan import Configuration, Plan, Rejected
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.charts import Chart, empty_figure, unit_of
from plimsoll.report.plan_sheets import choices_text, limit_bytes_of, stays_under

_MARGIN = 0.08  # share of the range of the points, on each side
_MOST_LABELS = 6  # labels of fallbacks: more would overlap

Point = Configuration | Rejected


def fallback_chart(plan: Plan) -> Chart:
    """Return the chart of peak and step time of the plan, its fallbacks and the rejected combinations."""
    title = "Peak and step time"
    groups = _groups(plan)
    points = [point for group in groups.values() for point in group]
    if not points:
        return Chart("fallback_schedule", title, "No configuration was predicted.", None)
    limit_bytes = limit_bytes_of(plan)
    peaks = [_peak_bytes(point) for point in points]
    unit, unit_bytes = unit_of(max(*peaks, limit_bytes or 0))
    figure = empty_figure(f"peak, {unit}", "step time, seconds")
    for name, group in groups.items():
        _add_group(figure, name, group, unit_bytes)
    _label_fallbacks(figure, plan, unit_bytes)
    if limit_bytes is not None:
        _add_limit(figure, limit_bytes, unit_bytes)
    xs = [peak / unit_bytes for peak in peaks] + ([limit_bytes / unit_bytes] if limit_bytes is not None else [])
    figure.update_xaxes(range=_span(xs), showgrid=True)
    figure.update_yaxes(range=_span([_seconds(point) for point in points]))
    figure.update_layout(hovermode="closest")
    limit = "" if limit_bytes is None else f" Points left of the limit of {format_bytes(limit_bytes)} fit."
    caption = f"Predicted for {len(points):,} ways to run the same step.{limit} Lower is faster."
    return Chart("fallback_schedule", title, caption, figure.to_plotly_json())


def _groups(plan: Plan) -> dict[str, list[Point]]:
    """Return the configurations to draw, by the name of their group in the legend. Later groups are drawn on top."""
    limit_bytes = limit_bytes_of(plan)
    rejected = _known(plan.rejected)
    return {
        "rejected, too large": [point for point in rejected if not _fits(point, limit_bytes)],
        "rejected": [point for point in rejected if _fits(point, limit_bytes)],
        "not allowed": _known(plan.lossy_alternatives),
        "no technique": _known([plan.plain] if plan.plain else []),
        "plan and fallbacks": _known(plan.fallbacks),
    }


_STYLES = {
    "rejected, too large": ("var(--muted)", "x-thin-open", 7),
    "rejected": ("var(--second)", "circle-open", 7),
    "not allowed": ("var(--warning)", "diamond-open", 9),
    "no technique": ("var(--line)", "square", 10),
    "plan and fallbacks": ("var(--accent)", "circle", 10),
}


def _known(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.peak is not None and point.step_time is not None]


def _fits(point: Point, limit_bytes: int | None) -> bool:
    assert point.peak is not None
    return stays_under(point.peak, limit_bytes)


def _peak_bytes(point: Point) -> int:
    assert point.peak is not None
    return point.peak.likely_bytes


def _seconds(point: Point) -> float:
    assert point.step_time is not None
    return point.step_time.likely_seconds


def _add_group(figure: go.Figure, name: str, group: list[Point], unit_bytes: int) -> None:
    if not group:
        return
    colour, symbol, size = _STYLES[name]
    is_schedule = name == "plan and fallbacks"
    figure.add_scatter(
        name=name,
        x=[round(_peak_bytes(point) / unit_bytes, 4) for point in group],
        y=[round(_seconds(point), 5) for point in group],
        mode="lines+markers" if is_schedule else "markers",
        line={"color": colour, "width": 1.2, "dash": "dot"},
        marker={"color": colour, "size": size, "symbol": symbol, "line": {"width": 1.6, "color": colour}},
        text=[_told(point) for point in group],
        hovertemplate="%{text}<extra></extra>",
    )


def _told(point: Point) -> str:
    """Return the hover text of a point, with HTML escaped, because plotly interprets markup."""
    choices = html.escape(choices_text(point.choices), quote=False).replace(" + ", " +<br>")
    return f"{choices}<br>{format_bytes(_peak_bytes(point))}, {format_seconds(_seconds(point))} per step"


def _label_fallbacks(figure: go.Figure, plan: Plan, unit_bytes: int) -> None:
    first = "plan" if plan.fits else "lowest peak"
    for number, configuration in enumerate(plan.fallbacks[: _MOST_LABELS + 1]):
        if not _known([configuration]):
            continue
        figure.add_annotation(
            x=round(_peak_bytes(configuration) / unit_bytes, 4),
            y=round(_seconds(configuration), 5),
            text=str(number) if number else first,
            font={"color": "var(--accent)"},
            bgcolor="var(--page)",
            yshift=14,
            showarrow=False,
        )


def _add_limit(figure: go.Figure, limit_bytes: int, unit_bytes: int) -> None:
    figure.add_vline(
        x=round(limit_bytes / unit_bytes, 4),
        line={"color": "var(--line)", "width": 1.6, "dash": "dash"},
        annotation={
            "text": f"limit {format_bytes(limit_bytes)}",
            "font": {"color": "var(--line)", "size": 13},
            "bgcolor": "var(--page)",
            "showarrow": False,
        },
        annotation_position="top left",
    )


def _span(values: list[float]) -> list[float]:
    """Return the lower and upper end of an axis: the range of the values, with a margin.

    The margin above the values is twice the margin below them.
    """
    low, high = min(values), max(values)
    margin = _MARGIN * (high - low) or 0.5 * high or 1.0
    return [round(low - margin, 4), round(high + 2 * margin, 4)]
