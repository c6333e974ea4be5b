"""Charts of a run (memory, micro-batch, loss and throughput) as plotly figures, and helpers for all charts.

Colours are CSS variables (``var(--accent)``). The script of the page replaces them with the values of the light or dark
scheme, so one figure serves both. A line has at most about 2000 points, however long the run is: `thinned` keeps the
lowest and the highest point of every stretch of steps, so that no peak is lost.
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
HEADROOM = 1.12  # top of the axis as a share of the highest value: space for labels and event marks

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A figure with its title and caption. ``figure`` is ``None`` if there is no data to draw.

    ``key`` identifies the chart in the HTML page.
    """

    key: str
    title: str
    caption: str
    figure: dict[str, Any] | None


def run_charts(record: RunRecord) -> tuple[Chart, ...]:
    """Return the charts of a run, in the order of the page."""
    of_ranks = (ranks_chart(record),) if record.peak_bytes_of_ranks else ()
    return memory_chart(record), *of_ranks, micro_batch_chart(record), loss_chart(record), throughput_chart(record)


def thinned(points: Points, most_points: int = _MOST_POINTS) -> Points:
    """Return the first and last point, and the lowest and highest point of each of several equal stretches.

    These are at most ``most_points`` + 2 points.
    """
    return [points[row] for row in thinned_rows([y for _, y in points], most_points)]


def thinned_rows(values: Sequence[float], most_rows: int = _MOST_POINTS) -> list[int]:
    """Return the indices of the values that `thinned` keeps."""
    if len(values) <= most_rows:
        return list(range(len(values)))
    stretch = math.ceil(2 * len(values) / most_rows)
    kept = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        rows = range(start, min(start + stretch, len(values)))
        kept |= {min(rows, key=values.__getitem__), max(rows, key=values.__getitem__)}
    return sorted(kept)


def memory_chart(record: RunRecord) -> Chart:
    """Return the chart of memory over time with the budget, out-of-memory events and killed processes."""
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
    figure.update_xaxes(rangemode="tozero")  # otherwise marks make the axis start before the run
    scale = (unit_seconds, unit_bytes)
    add_line(
        figure, f"used, {timeline.source}", _scaled(thinned(used), scale), "var(--accent)", fill="var(--accent-soft)"
    )
    name = "peak of each step, highest rank" if record.peak_bytes_of_ranks else "peak of each step"
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
    samples = f"sampled {len(used):,} times" if used else "only the peak of each step is known"
    what = f"{used_name(record.device).capitalize()}, {timeline.source}, {samples}"
    caption = f"{what}. Highest {format_bytes(record.peak_bytes)}{_in_step(record)}, {budget}."
    return Chart("memory", title, caption, figure.to_plotly_json())


def _in_step(record: RunRecord) -> str:
    """Return the step with the highest peak, such as `` in step 12``, or "" if the peak was in an unfinished step."""
    peak_bytes = record.peak_bytes  # stored, because the property loops over all steps
    steps = [line.step for line in record.finished_steps if line.peak_bytes == peak_bytes]
    return f" in step {steps[0]:,}" if steps else ""


def ranks_chart(record: RunRecord) -> Chart:
    """Return the chart of the peak of each step on each rank, which shows whether some ranks need more memory."""
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
    caption = f"Peak {used_name(record.device)} of each of {num_ranks} ranks, per step."
    return Chart("ranks", "Memory per rank", caption, figure.to_plotly_json())


def micro_batch_chart(record: RunRecord) -> Chart:
    """Return the chart of the micro-batch of each step."""
    title = "Micro-batch"
    points: Points = [(line.step, line.micro_batch) for line in record.finished_steps]
    if not points:
        return _no_steps("micro-batch", title)
    figure = _step_figure("samples", points)
    add_line(figure, "micro-batch", thinned(points), "var(--accent)", shape="hvh")
    caption = "Samples per forward and backward pass. The batch of an optimizer step never changes."
    return Chart("micro-batch", title, caption, figure.to_plotly_json())


def loss_chart(record: RunRecord) -> Chart:
    """Return the chart of the training loss of each step and the validation loss."""
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
    """Return the chart of the samples or tokens per second of each step."""
    title = "Throughput"
    speeds = [(line.step, step_speed(line)) for line in record.finished_steps]
    points: Points = [(step, speed) for step, speed in speeds if speed is not None]
    if not points:
        return _no_steps("throughput", title)
    unit = record.unit_name
    figure = _step_figure(f"{unit}/s", points)
    add_line(figure, f"{unit}/s", thinned(points), "var(--accent)")
    caption = f"{unit.capitalize()} per second in each step."
    return Chart("throughput", title, caption, figure.to_plotly_json())


def _no_steps(key: str, title: str) -> Chart:
    return Chart(key, title, "No step has finished.", None)


def _step_figure(y_title: str, points: Points) -> go.Figure:
    """Return a figure over steps without lines, with a y axis from zero to `HEADROOM` times the highest point."""
    figure = empty_figure("step", y_title)
    figure.update_yaxes(range=[0, HEADROOM * max(y for _, y in points)])
    _whole_steps(figure, len(points))
    return figure


def _whole_steps(figure: go.Figure, num_steps: int) -> None:
    """Limit the ticks to whole steps: in a short run, plotly would label step 1.5."""
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
        "plot_bgcolor": "var(--page)",  # not transparent: the hover line takes the colour of its edge from it
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
    """Add a line to a figure, unless it has no points."""
    if not points:
        return
    figure.add_scatter(
        name=name,
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode=mode if len(points) > 1 else "markers",  # a line of one point is invisible
        line={"color": colour, "width": 1.6, "shape": shape},
        marker={"color": colour, "size": 6},
        fill="tozeroy" if fill else None,
        fillcolor=fill,
        hovertemplate="%{y:,.4~g}",
    )


def _marks(figure: go.Figure, name: str, points: Points, *, colour: str, symbol: str) -> None:
    """Add marks to a figure, unless there are no points."""
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
    """Draw a horizontal limit line with its label."""
    figure.add_hline(
        y=y,
        line={"color": "var(--line)", "width": 1.6, "dash": "dash"},
        annotation={
            "text": label,
            "font": {"color": "var(--line)", "size": 13},
            "bgcolor": "var(--page)",  # the label may cover lines that cross the limit
            "yanchor": "bottom",
            "showarrow": False,
        },
        annotation_position="top right",
    )


def _scaled(points: Points, scale: tuple[float, float]) -> Points:
    """Divide x and y by the two scales, and round them to four decimals: finer than a pixel, but short in the page."""
    return [(round(x / scale[0], 4), round(y / scale[1], 4)) for x, y in points]


def unit_of(num_bytes: int) -> tuple[str, int]:
    """Return the unit in which `format_bytes` writes a size, such as ``"MiB"``, and the bytes of that unit."""
    unit = format_bytes(num_bytes).split()[1]
    return unit, parse_bytes(f"1{unit}")


def _time_unit(last_seconds: float) -> tuple[str, float]:
    if last_seconds < 120:
        return "seconds", 1.0
    return ("minutes", 60.0) if last_seconds < 7200 else ("hours", 3600.0)
