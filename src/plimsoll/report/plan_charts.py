"""The chart of a plan: every way to run a step that has numbers, by what it needs and how long it takes.

The line of the budget is upright: what lies left of it fits. Whatever was not predicted is missing, and the caption
says how many are drawn.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from plimsoll.records.plan import Plan, Rejected, Rung
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.charts import Chart, empty_figure, unit_of
from plimsoll.report.plan_sheets import choices_text, limit_bytes_of, stays_under

_MARGIN = 0.08  # of what the points span, on each side
_MOST_LABELS = 6  # of fallbacks: more would cover each other

Way = Rung | Rejected


def ladder_chart(plan: Plan) -> Chart:
    """Draw the peak and the step time of the plan, its fallbacks and what was rejected, with the limit."""
    title = "Memory against time"
    groups = _groups(plan)
    ways = [way for group in groups.values() for way in group]
    if not ways:
        return Chart("ladder", title, "Nothing was predicted.", None)
    limit_bytes = limit_bytes_of(plan)
    peaks = [_peak_bytes(way) for way in ways]
    unit, unit_bytes = unit_of(max(*peaks, limit_bytes or 0))
    figure = empty_figure(f"peak, {unit}", "seconds a step")
    for name, group in groups.items():
        _add_group(figure, name, group, unit_bytes)
    _label_rungs(figure, plan, unit_bytes)
    if limit_bytes is not None:
        _add_limit(figure, limit_bytes, unit_bytes)
    xs = [peak / unit_bytes for peak in peaks] + ([limit_bytes / unit_bytes] if limit_bytes is not None else [])
    figure.update_xaxes(range=_span(xs), showgrid=True)
    figure.update_yaxes(range=_span([_seconds(way) for way in ways]))
    figure.update_layout(hovermode="closest")
    limit = "" if limit_bytes is None else f" What lies left of the limit of {format_bytes(limit_bytes)} fits."
    caption = f"Predicted, for {len(ways):,} ways to run the same step.{limit} Lower is faster."
    return Chart("ladder", title, caption, figure.to_plotly_json())


def _groups(plan: Plan) -> dict[str, list[Way]]:
    """What is drawn alike; what comes later lies above."""
    limit_bytes = limit_bytes_of(plan)
    rejected = _known(plan.rejected)
    return {
        "rejected, too large": [way for way in rejected if not _fits(way, limit_bytes)],
        "rejected": [way for way in rejected if _fits(way, limit_bytes)],
        "not allowed": _known(plan.openings),
        "plain loop": _known([plan.plain] if plan.plain else []),
        "plan and fallbacks": _known(plan.rungs),
    }


_STYLES = {
    "rejected, too large": ("var(--muted)", "x-thin-open", 7),
    "rejected": ("var(--second)", "circle-open", 7),
    "not allowed": ("var(--warning)", "diamond-open", 9),
    "plain loop": ("var(--line)", "square", 10),
    "plan and fallbacks": ("var(--accent)", "circle", 10),
}


def _known(ways: Sequence[Way]) -> list[Way]:
    return [way for way in ways if way.peak is not None and way.step_time is not None]


def _fits(way: Way, limit_bytes: int | None) -> bool:
    assert way.peak is not None
    return stays_under(way.peak, limit_bytes)


def _peak_bytes(way: Way) -> int:
    assert way.peak is not None
    return way.peak.likely_bytes


def _seconds(way: Way) -> float:
    assert way.step_time is not None
    return way.step_time.likely_seconds


def _add_group(figure: go.Figure, name: str, group: list[Way], unit_bytes: int) -> None:
    if not group:
        return
    colour, symbol, size = _STYLES[name]
    is_ladder = name == "plan and fallbacks"
    figure.add_scatter(
        name=name,
        x=[round(_peak_bytes(way) / unit_bytes, 4) for way in group],
        y=[round(_seconds(way), 5) for way in group],
        mode="lines+markers" if is_ladder else "markers",
        line={"color": colour, "width": 1.2, "dash": "dot"},
        marker={"color": colour, "size": size, "symbol": symbol, "line": {"width": 1.6, "color": colour}},
        text=[_told(way) for way in group],
        hovertemplate="%{text}<extra></extra>",
    )


def _told(way: Way) -> str:
    """What a point is, escaped and in lines: plotly reads markup in it."""
    choices = html.escape(choices_text(way.choices), quote=False).replace(" + ", " +<br>")
    return f"{choices}<br>{format_bytes(_peak_bytes(way))}, {format_seconds(_seconds(way))} a step"


def _label_rungs(figure: go.Figure, plan: Plan, unit_bytes: int) -> None:
    first = "plan" if plan.fits else "needs least"
    for number, rung in enumerate(plan.rungs[: _MOST_LABELS + 1]):
        if not _known([rung]):
            continue
        figure.add_annotation(
            x=round(_peak_bytes(rung) / unit_bytes, 4),
            y=round(_seconds(rung), 5),
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
    """From the least to the most with room around; one value alone is in the middle."""
    low, high = min(values), max(values)
    margin = _MARGIN * (high - low) or 0.5 * high or 1.0
    return [round(low - margin, 4), round(high + 2 * margin, 4)]
