"""Chart of a prediction: memory by category, stacked, over all allocations and frees of the training steps.

The x axis is the order of events, not time, and is labelled with the phases. The chart has about 2000 points, however
long the trace is, and the peak is one of them.

Not handled: the duration of each operation.
"""

from __future__ import annotations

import html
from itertools import groupby

import plotly.graph_objects as go

from plimsoll.records.prediction import MemoryTimeline, Prediction
from plimsoll.records.trace import CATEGORIES, Category
from plimsoll.records.units import format_bytes, parse_bytes
from plimsoll.report.charts import HEADROOM, Chart, empty_figure, limit_line, thinned_rows, unit_of

# From the bottom: constant memory, training state, short-lived tensors, memory reserved but not allocated.
_STACK: tuple[Category, ...] = (
    "baseline",
    "context",
    "parameters",
    "buffers",
    "embeddings",
    "optimizer states",
    "gradients",
    "inputs",
    "activations",
    "temporaries",
    "fragmentation",
)
_LEAST_SHADED_SHARE, _LEAST_NAMED_SHARE = 0.005, 0.04  # share of the chart's width, per phase
_MOST_LIMIT_SHARE = 3.0  # of the highest value: a higher limit is not drawn, because it would flatten the chart

Band = tuple[str, int, int, int]  # phase, step, first row, row after the last


def prediction_chart(prediction: Prediction) -> Chart:
    """Return the chart of the predicted memory, its limit and its peak."""
    title, timeline = "Memory by category", prediction.timeline
    if not timeline.used_bytes:
        return Chart("memory", title, "No timeline was recorded.", None)
    highest_bytes = max(*timeline.used_bytes, *timeline.reserved_bytes, prediction.peak.likely_bytes)
    unit, unit_bytes = unit_of(highest_bytes)
    figure = empty_figure("", unit)
    rows = _drawn_rows(timeline)
    _add_categories(figure, timeline, rows, unit)
    _add_lines(figure, timeline, rows, unit)
    _add_bands(figure, _bands(timeline))
    _mark_peak(figure, timeline, unit_bytes)
    is_limit_near = prediction.limit_bytes <= _MOST_LIMIT_SHARE * highest_bytes
    if is_limit_near:
        limit = f"limit {format_bytes(prediction.limit_bytes)}"
        limit_line(figure, round(prediction.limit_bytes / unit_bytes, 4), limit)
        highest_bytes = max(highest_bytes, prediction.limit_bytes)
    figure.update_yaxes(range=[0, round(HEADROOM * highest_bytes / unit_bytes, 4)])
    figure.update_xaxes(range=[0, max(1, len(timeline.used_bytes) - 1)])
    return Chart("memory", title, _caption(prediction, is_limit_near), figure.to_plotly_json())


def _caption(prediction: Prediction, is_limit_near: bool) -> str:
    timeline = prediction.timeline
    limit = f"limit {format_bytes(prediction.limit_bytes)}{'' if is_limit_near else ', above the chart'}"
    used = format_bytes(max(timeline.used_bytes))
    what = f"{timeline.source.capitalize()}, in the order of allocations and frees; backward and evaluation are shaded."
    return f"{what} Highest use {used}, {limit}."


def _drawn_rows(timeline: MemoryTimeline) -> list[int]:
    reserved = timeline.reserved_bytes
    most_reserved = max(range(len(reserved)), key=reserved.__getitem__, default=0)
    return sorted({*thinned_rows(timeline.used_bytes), _peak_row(timeline), most_reserved})


def _peak_row(timeline: MemoryTimeline) -> int:
    return min(max(timeline.peak_row, 0), len(timeline.used_bytes) - 1)


def _add_categories(figure: go.Figure, timeline: MemoryTimeline, rows: list[int], unit: str) -> None:
    unit_bytes = parse_bytes(f"1{unit}")
    for category in sorted(timeline.categories, key=_STACK.index):
        column = timeline.categories[category]
        figure.add_scatter(
            name=category,
            x=rows,
            y=[round(column[row] / unit_bytes, 4) for row in rows],
            mode="lines",
            line={"width": 0, "shape": "hv"},
            fillcolor=f"var(--{category.replace(' ', '-')})",
            stackgroup="memory",
            hovertemplate=f"%{{y:,.4~g}} {unit}",
        )


def _add_lines(figure: go.Figure, timeline: MemoryTimeline, rows: list[int], unit: str) -> None:
    """Add the lines of memory in use and reserved, and an invisible line that carries the hover text."""
    unit_bytes = parse_bytes(f"1{unit}")
    for name, column, width in (("in use", timeline.used_bytes, 0), ("reserved", timeline.reserved_bytes, 1.6)):
        if not column:
            continue
        figure.add_scatter(
            name=name,
            x=rows,
            y=[round(column[row] / unit_bytes, 4) for row in rows],
            mode="lines",
            line={"color": "var(--text)", "width": width, "shape": "hv", "dash": "dot"},
            hovertemplate=f"%{{y:,.4~g}} {unit}",
            showlegend=bool(width),
        )
    figure.add_scatter(
        name="",
        x=rows,
        y=[0] * len(rows),
        mode="lines",
        line={"width": 0},
        text=[_ran(timeline, row) for row in rows],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )


def _ran(timeline: MemoryTimeline, row: int) -> str:
    """Return the moment and operation at a row of the timeline as text.

    HTML is escaped, because plotly interprets markup in names.
    """
    step, phase = timeline.step[row], timeline.phase[row]
    moment = f"step {step:,}, {phase}" if step else phase
    return html.escape(f"{moment}: {timeline.label[row]}", quote=False)


def _bands(timeline: MemoryTimeline) -> list[Band]:
    """Return, for each run of consecutive rows with the same phase and step: phase, step, first row, and end row.

    The end row is the row after the last.
    """
    bands: list[Band] = []
    first = 0
    for (step, phase), group in groupby(zip(timeline.step, timeline.phase, strict=True)):
        after = first + sum(1 for _ in group)
        bands.append((phase, step, first, after))
        first = after
    return bands


def _add_bands(figure: go.Figure, bands: list[Band]) -> None:
    """Mark the steps, shade backward and evaluation, and label wide phases on the axis."""
    num_rows = bands[-1][3]
    for phase, _, first, after in bands:
        if phase in {"backward", "evaluation"} and after - first >= _LEAST_SHADED_SHARE * num_rows:
            figure.add_vrect(x0=first, x1=after, fillcolor="var(--band)", line_width=0, layer="below")
    for step, group in groupby(bands, key=lambda band: band[1]):
        first = next(group)[2]
        if step:
            figure.add_vline(x=first, line={"color": "var(--muted)", "width": 1, "dash": "dot"}, opacity=0.6)
            figure.add_annotation(
                x=first, y=1, yref="paper", text=f" step {step:,}", xanchor="left", yanchor="top", showarrow=False
            )
    named = [band for band in bands if band[3] - band[2] >= _LEAST_NAMED_SHARE * num_rows]
    figure.update_xaxes(
        tickvals=[(first + after) / 2 for _, _, first, after in named],
        ticktext=[phase for phase, _, _, _ in named],
        unifiedhovertitle={"text": "point %{x:,}"},
        spikethickness=1,
        spikedash="solid",
        spikecolor="var(--muted)",
    )


def _mark_peak(figure: go.Figure, timeline: MemoryTimeline, unit_bytes: int) -> None:
    row = _peak_row(timeline)
    figure.add_scatter(
        name="peak",
        x=[row],
        y=[round(timeline.used_bytes[row] / unit_bytes, 4)],
        mode="markers",
        marker={"color": "var(--line)", "size": 10, "symbol": "circle-open", "line": {"width": 2}},
        hoverinfo="skip",
        cliponaxis=False,
    )


assert set(_STACK) == set(CATEGORIES)
