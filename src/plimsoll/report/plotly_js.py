"""The basic bundle of plotly.js in ``vendor``, which draws the charts of a page.

The full bundle of the plotly package has 4.6 MiB, four times as much, for traces that no page uses: maps, 3D, finance.
Source: https://registry.npmjs.org/plotly.js-basic-dist-min/-/plotly.js-basic-dist-min-4.1.1.tgz. The two files in
``vendor`` are its ``package/plotly-basic.min.js`` and ``package/LICENSE`` (MIT). For an update, take the version of
``plotly.offline.get_plotlyjs_version()`` and change ``VERSION`` and ``SHA_256``.

The bundle draws scatter (lines, areas, points), bar and pie traces.

Not handled: heat maps, histograms and other traces. plotly draws nothing in their place.
"""

from __future__ import annotations

from importlib.resources import files

from markupsafe import Markup

VERSION = "4.1.1"
SHA_256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
TRACES = frozenset({"scatter", "bar", "pie"})
"""Trace types that the bundle can draw."""


def plotly_js() -> Markup:
    """Return the script, for a ``<script>`` element."""
    return Markup(files("plimsoll.report").joinpath("vendor/plotly-basic.min.js").read_text("utf-8"))
