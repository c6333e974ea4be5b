"""``plimsoll probe``: the memory of this machine, the limits on it, and its current use."""

from __future__ import annotations

from plimsoll.cli.options import AsJson


def probe(
    as_json: AsJson = False,
) -> None:
    """Show devices, their memory, and every limit on this process.

    \b
    Examples:
      plimsoll probe
      plimsoll probe --json
    """
    from plimsoll.cli.answer import show_record
    from plimsoll.report.progress import spinner

    with spinner(quiet=as_json):
        from plimsoll.device.probe import probe_machine

        machine = probe_machine()
    show_record(machine, as_json)
