"""The script of the charts has the declared version, and can draw all types of charts in use."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from plimsoll import report
from plimsoll.report.plotly_js import SHA_256, TRACES, VERSION, plotly_js


def test_it_is_the_file_that_its_authors_gave_out():
    text = str(plotly_js())
    assert hashlib.sha256(text.encode()).hexdigest() == SHA_256
    assert f"plotly.js (basic - minified) v{VERSION}" in text[:100]
    assert "</script" not in text.lower()  # this text would end the script element
    assert "MIT License" in files("plimsoll.report").joinpath("vendor/LICENSE").read_text()


def test_it_can_draw_every_trace_that_a_chart_has():
    source = "".join(path.read_text() for path in Path(report.__file__).parent.glob("*.py"))
    added = set(re.findall(r"figure\.add_([a-z]+)", source))
    is_trace = {one: getattr(go, one.capitalize(), object) for one in added}
    traces = {one for one, kind in is_trace.items() if issubclass(kind, BaseTraceType)}
    assert traces
    assert traces <= TRACES
