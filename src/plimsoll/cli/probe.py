"""``plimsoll probe``: what memory this machine has, what limits it, and what is used."""

from __future__ import annotations

from plimsoll.cli.options import AsJson


def probe(
    as_json: AsJson = False,
) -> None:
    """Show the devices of this machine, their memory, and every limit on this process.

    \b
    Examples:
      plimsoll probe
      plimsoll probe --json
    """
    from plimsoll.cli.output import show
    from plimsoll.report.progress import spinner
    from plimsoll.report.render import render

    with spinner(quiet=as_json):
        from plimsoll.device.probe import probe_machine

        machine = probe_machine()
    show(render(machine, "json" if as_json else "text"))
