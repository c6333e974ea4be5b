"""The charts of a run, and what all charts have in common, as plotly figures: memory, loss, throughput and micro-batch.

Colours are CSS variables of the page (``var(--accent)``); the page's script puts in the values of the light or the dark
scheme, so one figure serves both. A chart holds at most about 2000 points per line, whatever the run's length:
`thinned` keeps the lowest and the highest point of every stretch, so no peak is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from plimsoll.records.run import RunRecord
from plimsoll.records.units import format_bytes, parse_bytes
from plimsoll.report.sheets import step_speed, used_name

_MOST_POINTS = 2000  # about two per pixel of the widest chart
HEADROOM = 1.12  # of the highest value: room for the budget's label and the event marks

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A figure with its title and the sentence that says what it shows; ``figure`` is ``None`` without data."""

    key: str
    title: str
    caption: str
    figure: dict[str, Any] | None


def run_charts(record: RunRecord) -> tuple[Chart, ...]:
    """Make the charts of a run, in the order of the page."""
    of_ranks = (ranks_chart(record),) if record.peak_bytes_of_ranks else ()
    return memory_chart(record), *of_ranks, micro_batch_chart(record), loss_chart(record), throughput_chart(record)


def thinned(points: Points, most_points: int = _MOST_POINTS) -> Points:
    """Return the lowest and the highest point of equal stretches, and both ends: at most ``most_points`` + 2 points."""
    return [points[row] for row in thinned_rows([y for _, y in points], most_points)]


def thinned_rows(values: Sequence[float], most_rows: int = _MOST_POINTS) -> list[int]:
    """Return the rows that `thinned` keeps of a column."""
    if len(values) <= most_rows:
        return list(range(len(values)))
    stretch = math.ceil(2 * len(values) / most_rows)
    kept = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        rows = range(start, min(start + stretch, len(values)))
        kept |= {min(rows, key=values.__getitem__), max(rows, key=values.__getitem__)}
    return sorted(kept)


def memory_chart(record: RunRecord) -> Chart:
    """Memory over time against the line of the budget, with the moments memory ran out."""
    title = "Memory over time"
    timeline = record.timeline
    used: Points = list(zip(timeline.time_seconds, timeline.used_bytes, strict=True))
    peaks: Points = [(line.time_seconds, line.peak_bytes) for line in record.steps if line.peak_bytes is not None]
    if record.peak_bytes is None:
        return Chart("memory", title, "No memory was measured.", None)
    top_bytes = HEADROOM * max(record.peak_bytes, record.limit_bytes or 0)
    byte_unit, unit_bytes = unit_of(record.peak_bytes)
    time_unit, unit_seconds = _time_unit(max(seconds for seconds, _ in used + peaks))
    figure = empty_figure(f"{time_unit} since the start", byte_unit)
    figure.update_yaxes(range=[0, top_bytes / unit_bytes])
    figure.update_xaxes(rangemode="tozero")  # marks would have the axis begin before the run
    scale = (unit_seconds, unit_bytes)
    add_line(
        figure, f"used, {timeline.source}", _scaled(thinned(used), scale), "var(--accent)", fill="var(--accent-soft)"
    )
    name = "peak of each step, of all ranks" if record.peak_bytes_of_ranks else "peak of each step"
    add_line(figure, name, _scaled(thinned(peaks), scale), "var(--second)")
    highest = max(used + peaks, key=lambda point: point[1])
    _marks(figure, "highest", _scaled([highest], scale), colour="var(--second)", symbol="diamond")
    ooms: Points = [(event.time_seconds, top_bytes) for event in record.oom_events]
    _marks(figure, "out of memory", _scaled(ooms, scale), colour="var(--warning)", symbol="triangle-down")
    deaths: Points = [(death.time_seconds, top_bytes) for death in record.deaths]
    _marks(figure, "process killed", _scaled(deaths, scale), colour="var(--line)", symbol="x")
    budget = "no budget"
    if record.limit_bytes is not None:
        budget = f"budget {format_bytes(record.limit_bytes)}"
        limit_line(figure, record.limit_bytes / unit_bytes, budget)
    samples = f"sampled {len(used):,} times" if used else "known only as the peak of each step"
    what = f"{used_name(record.device).capitalize()}, {timeline.source}, {samples}"
    caption = f"{what}. Highest {format_bytes(record.peak_bytes)}{_in_step(record)}, {budget}."
    return Chart("memory", title, caption, figure.to_plotly_json())


def _in_step(record: RunRecord) -> str:
    """Say which step took the most; nothing where it was one that did not end."""
    peak_bytes = record.peak_bytes  # looks at every step
    steps = [line.step for line in record.finished_steps if line.peak_bytes == peak_bytes]
    return f" in step {steps[0]:,}" if steps else ""


def ranks_chart(record: RunRecord) -> Chart:
    """The peak of each step on each rank: how evenly the work is shared out."""
    steps = [line for line in record.finished_steps if line.peak_bytes_of_ranks]
    num_ranks = max(len(line.peak_bytes_of_ranks) for line in steps)
    byte_unit, unit_bytes = unit_of(max(max(line.peak_bytes_of_ranks) for line in steps))
    lines: list[Points] = [
        [
            (line.step, round(line.peak_bytes_of_ranks[rank] / unit_bytes, 4))
            for line in steps
            if rank < len(line.peak_bytes_of_ranks)
        ]
        for rank in range(num_ranks)
    ]
    figure = _step_figure(byte_unit, max(lines, key=lambda points: max(y for _, y in points)))
    for rank, points in enumerate(lines):
        add_line(figure, f"rank {rank}", thinned(points), f"hsl({round(205 + 360 * rank / num_ranks) % 360} 55% 50%)")
    if record.limit_bytes is not None:
        figure.update_yaxes(range=[0, HEADROOM * max(record.limit_bytes, record.peak_bytes or 0) / unit_bytes])
        limit_line(figure, record.limit_bytes / unit_bytes, f"budget {format_bytes(record.limit_bytes)}")
    caption = f"{used_name(record.device).capitalize()} of each of {num_ranks} processes at its highest, step by step."
    return Chart("ranks", "Memory of the ranks", caption, figure.to_plotly_json())


def micro_batch_chart(record: RunRecord) -> Chart:
    """The micro-batch of each step."""
    title = "Micro-batch in force"
    points: Points = [(line.step, line.micro_batch) for line in record.finished_steps]
    if not points:
        return _no_steps("micro-batch", title)
    figure = _step_figure("samples", points)
    add_line(figure, "micro-batch", thinned(points), "var(--accent)", shape="hvh")
    caption = "Samples per forward and backward pass. The batch of an optimizer step never changes."
    return Chart("micro-batch", title, caption, figure.to_plotly_json())


def loss_chart(record: RunRecord) -> Chart:
    """Training loss of each step and validation loss."""
    steps = record.finished_steps
    if not steps:
        return _no_steps("loss", "Loss")
    train: Points = [(line.step, line.loss) for line in steps if math.isfinite(line.loss)]
    validation: Points = [(line.step, line.loss) for line in record.evaluations if math.isfinite(line.loss)]
    figure = empty_figure("step", "loss")
    _whole_steps(figure, len(steps))
    add_line(figure, "training", thinned(train), "var(--accent)")
    add_line(figure, "validation", validation, "var(--second)", mode="lines+markers")
    lines = "training and validation" if validation else "training only"
    caption = f"Mean per {record.unit_name.removesuffix('s')}; {lines}."
    num_left_out = len(steps) - len(train)
    if num_left_out:
        caption += f" Not drawn, because not a finite number: {num_left_out:,} of {len(steps):,} steps."
    return Chart("loss", "Loss", caption, figure.to_plotly_json())


def throughput_chart(record: RunRecord) -> Chart:
    """Units of the loss per second, step by step."""
    title = "Throughput"
    speeds = [(line.step, step_speed(line)) for line in record.finished_steps]
    points: Points = [(step, speed) for step, speed in speeds if speed is not None]
    if not points:
        return _no_steps("throughput", title)
    unit = record.unit_name
    figure = _step_figure(f"{unit}/s", points)
    add_line(figure, f"{unit}/s", thinned(points), "var(--accent)")
    caption = f"{unit.capitalize()} per second of each step's own time."
    return Chart("throughput", title, caption, figure.to_plotly_json())


def _no_steps(key: str, title: str) -> Chart:
    return Chart(key, title, "No step has finished.", None)


def _step_figure(y_title: str, points: Points) -> go.Figure:
    """A figure over the steps that begins at zero and has room above the highest point."""
    figure = empty_figure("step", y_title)
    figure.update_yaxes(range=[0, HEADROOM * max(y for _, y in points)])
    _whole_steps(figure, len(points))
    return figure


def _whole_steps(figure: go.Figure, num_steps: int) -> None:
    """There is no step 1.5, which plotly would write in a short run."""
    if num_steps <= 10:
        figure.update_xaxes(dtick=1)


def empty_figure(x_title: str, y_title: str) -> go.Figure:
    """Return a figure in the style of the page, without data."""
    axis = {
        "gridcolor": "var(--rule)",
        "linecolor": "var(--rule)",
        "zeroline": False,
        "automargin": True,
        "tickformat": ",",
    }
    layout: dict[str, Any] = {
        "template": "none",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--muted)"},
        "paper_bgcolor": "var(--page)",
        "plot_bgcolor": "var(--page)",  # and not transparent: the line under the pointer takes its edge from it
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "hovermode": "x unified",
        "hoverdistance": -1,
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--rule)", "font": {"color": "var(--text)"}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 10, "font": {"size": 13}}, "showgrid": False},
        "yaxis": {**axis, "title": {"text": y_title, "standoff": 10, "font": {"size": 13}}},
    }
    return go.Figure(layout=layout)


def add_line(
    figure: go.Figure,
    name: str,
    points: Points,
    colour: str,
    *,
    fill: str | None = None,
    shape: str = "linear",
    mode: str = "lines",
) -> None:
    """Add a line, if it has points."""
    if not points:
        return
    figure.add_scatter(
        name=name,
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode=mode if len(points) > 1 else "markers",  # a line of one point would not be seen
        line={"color": colour, "width": 1.6, "shape": shape},
        marker={"color": colour, "size": 6},
        fill="tozeroy" if fill else None,
        fillcolor=fill,
        hovertemplate="%{y:,.4~g}",
    )


def _marks(figure: go.Figure, name: str, points: Points, *, colour: str, symbol: str) -> None:
    """Add marks, if there are any; those without a height of their own go along the upper edge."""
    if not points:
        return
    figure.add_scatter(
        name=name,
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="markers",
        marker={"color": colour, "size": 10, "symbol": symbol},
        cliponaxis=False,
        hoverinfo="x+name",
    )


def limit_line(figure: go.Figure, y: float, label: str) -> None:
    """Draw the line that nothing should cross."""
    figure.add_hline(
        y=y,
        line={"color": "var(--line)", "width": 1.6, "dash": "dash"},
        annotation={
            "text": label,
            "font": {"color": "var(--line)", "size": 13},
            "bgcolor": "var(--page)",  # it may be in front of what crosses the line
            "yanchor": "bottom",
            "showarrow": False,
        },
        annotation_position="top right",
    )


def _scaled(points: Points, scale: tuple[float, float]) -> Points:
    """Four decimals are finer than a pixel and keep the page small."""
    return [(round(x / scale[0], 4), round(y / scale[1], 4)) for x, y in points]


def unit_of(num_bytes: int) -> tuple[str, int]:
    """Return the unit in which a size is written, and its bytes: the axis and the sentences use the same."""
    unit = format_bytes(num_bytes).split()[1]
    return unit, parse_bytes(f"1{unit}")


def _time_unit(last_seconds: float) -> tuple[str, float]:
    if last_seconds < 120:
        return "seconds", 1.0
    return ("minutes", 60.0) if last_seconds < 7200 else ("hours", 3600.0)
