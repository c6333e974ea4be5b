"""Charts of a recording of ``plimsoll watch``: memory of each process, use of each limit, and speed of the run.

Processes are stacked, the largest at the bottom. All processes after the eighth form one layer. Pages shared after a
fork count in each process, so the sum can exceed the memory of the machine.
"""

from __future__ import annotations

import plotly.graph_objects as go

from plimsoll.records.units import format_bytes
from plimsoll.records.watch import WatchRecord
from plimsoll.report.charts import HEADROOM, Chart, empty_figure, limit_line, thinned_rows, unit_of
from plimsoll.report.watch_sheets import lines_by_name

_MOST_PROCESSES = 8
_COLOURS = ("var(--accent)", "var(--second)", "var(--line)", "var(--warning)", "var(--muted)")
_DASHES = ("solid", "dash", "dot")


def watch_charts(record: WatchRecord) -> tuple[Chart, ...]:
    """Return the charts of a recording, in the order of the page."""
    charts = (process_chart(record), limit_chart(record))
    has_run = any(sample.run is not None and sample.run.units_per_second for sample in record.samples)
    return (*charts, speed_chart(record)) if has_run else charts


def process_chart(record: WatchRecord) -> Chart:
    """Return the chart of private memory over time, with a layer for each process."""
    title = "Private memory of each process"
    if not record.samples:
        return Chart("processes", title, "No sample was recorded.", None)
    peak_bytes = max(sample.private_bytes for sample in record.samples)
    unit, unit_bytes = unit_of(peak_bytes)
    figure = empty_figure("seconds since the watch began", unit)
    figure.update_yaxes(range=[0, HEADROOM * max(peak_bytes, 1) / unit_bytes])
    rows = thinned_rows([sample.private_bytes for sample in record.samples])
    seconds = [round(record.samples[row].seconds, 2) for row in rows]
    for number, (name, sizes) in enumerate(_layers(record)):
        figure.add_scatter(
            name=name,
            x=seconds,
            y=[round(sizes[row] / unit_bytes, 4) for row in rows],
            stackgroup="processes",
            mode="lines" if len(rows) > 1 else "markers",
            line={"color": _colour(number), "width": 1, "dash": _dash(number)},
            hovertemplate="%{y:,.4~g}",
        )
    caption = f"Measured, {len(record.samples):,} samples. Highest total of all processes: {format_bytes(peak_bytes)}."
    return Chart("processes", title, caption, figure.to_plotly_json())


def _layers(record: WatchRecord) -> list[tuple[str, list[int]]]:
    """Return the name of each layer and its bytes in each sample, largest process first.

    A process has 0 bytes in samples that do not list it. The smallest processes form one layer.
    """
    sizes = {pid: [0] * len(record.samples) for pid in record.uses_by_pid}
    names = {}
    for row, sample in enumerate(record.samples):
        for use in sample.processes:
            sizes[use.pid][row] = use.private_bytes
            names[use.pid] = f"{use.pid} {use.name}"
    largest = sorted(sizes, key=lambda pid: -max(sizes[pid]))
    layers = [(names[pid], sizes[pid]) for pid in largest[:_MOST_PROCESSES]]
    rest = [sizes[pid] for pid in largest[_MOST_PROCESSES:]]
    return [*layers, *([(f"{len(rest)} others", [sum(row) for row in zip(*rest, strict=True)])] if rest else [])]


def limit_chart(record: WatchRecord) -> Chart:
    """Return the chart of the use of each limit over time, in percent."""
    title = "Use of each limit"
    found = lines_by_name(record)
    if not found:
        return Chart("limits", title, "No sample was recorded.", None)
    figure = empty_figure("seconds since the watch began", "percent of the limit")
    most = 100.0
    for number, (name, seen) in enumerate(found.items()):
        percents = [100 * line.used_bytes / max(line.limit_bytes, 1) for _, line in seen]
        most = max(most, *percents)
        rows = thinned_rows(percents)
        figure.add_scatter(
            name=name,
            x=[round(seen[row][0], 2) for row in rows],
            y=[round(percents[row], 2) for row in rows],
            mode="lines" if len(rows) > 1 else "markers",
            line={"color": _colour(number), "width": 1.6, "dash": _dash(number)},
            hovertemplate="%{y:.1f} %",
        )
    _mark_warnings(figure, record, most)
    figure.update_yaxes(range=[0, HEADROOM * most])
    limit_line(figure, 100, "the limit")
    return Chart(
        "limits", title, "Measured. Triangles mark warnings that a limit would be reached.", figure.to_plotly_json()
    )


def _mark_warnings(figure: go.Figure, record: WatchRecord, most: float) -> None:
    seconds = [round(sample.seconds, 2) for sample in record.samples if sample.warnings]
    if seconds:
        figure.add_scatter(
            name="warning",
            x=seconds,
            y=[1.06 * most] * len(seconds),
            mode="markers",
            marker={"color": "var(--warning)", "size": 8, "symbol": "triangle-down"},
            hoverinfo="x+name",
        )


def speed_chart(record: WatchRecord) -> Chart:
    """Return the chart of samples or tokens per second, measured over the last steps before each sample."""
    runs = [(sample.seconds, sample.run) for sample in record.samples if sample.run is not None]
    points = [(seconds, run.units_per_second) for seconds, run in runs if run.units_per_second is not None]
    unit = f"{runs[-1][1].unit_name}/s"
    rows = thinned_rows([speed for _, speed in points])
    figure = empty_figure("seconds since the watch began", unit)
    figure.update_yaxes(range=[0, HEADROOM * max(speed for _, speed in points)])
    figure.add_scatter(
        name=unit,
        x=[round(points[row][0], 2) for row in rows],
        y=[round(points[row][1], 2) for row in rows],
        mode="lines" if len(rows) > 1 else "markers",
        line={"color": "var(--accent)", "width": 1.6},
        hovertemplate="%{y:,.4~g}",
    )
    return Chart("speed", "Throughput", "Measured by the run over its last steps.", figure.to_plotly_json())


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _dash(number: int) -> str:
    return _DASHES[number // len(_COLOURS) % len(_DASHES)]
