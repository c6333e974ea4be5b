"""The script that draws the charts of a page: plotly.js, the basic bundle of its authors, kept in ``vendor``.

The whole bundle that the plotly package has is 4.6 MiB, four times as much, for traces no page has: maps, 3D, finance.
Source: https://registry.npmjs.org/plotly.js-basic-dist-min/-/plotly.js-basic-dist-min-4.1.1.tgz, whose
``package/plotly-basic.min.js`` and ``package/LICENSE`` (MIT) are the two files. Take the version that
``plotly.offline.get_plotlyjs_version()`` names, and its SHA-256 with it.

Covers scatter (lines, areas, points), bar and pie traces. Does NOT have heat maps, histograms and other traces: plotly
would draw nothing in their place.
"""

from __future__ import annotations

from importlib.resources import files

from markupsafe import Markup

VERSION = "4.1.1"
SHA_256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
TRACES = frozenset({"scatter", "bar", "pie"})
"""The types of traces that the bundle can draw."""


def plotly_js() -> Markup:
    """Return the script, for a ``<script>`` element."""
    return Markup(files("plimsoll.report").joinpath("vendor/plotly-basic.min.js").read_text("utf-8"))
