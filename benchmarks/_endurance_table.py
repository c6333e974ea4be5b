"""The tables that `endurance.py` prints and files."""

from __future__ import annotations

import argparse

from _endurance_judge import Figures, Verdict
from plimsoll.records.units import format_bytes


def title(arguments: argparse.Namespace, budget_bytes: int) -> str:
    """Return the title: duration, model and budget."""
    within = format_bytes(budget_bytes)
    return f"{arguments.minutes:g} minutes of {arguments.model} within {within}, disturbed all the time"


def rows(verdicts: dict[str, Verdict], seconds: float) -> str:
    """Return the complete table as Markdown."""
    figures = {name: verdict.figures for name, verdict in verdicts.items()}
    lines = [*_what_was_done(figures, seconds), *_memory(figures["memory"]), *_results(figures)]
    return _table("what", [*lines, ("not as it should be", _faults(verdicts))])


def summary(verdicts: dict[str, Verdict], seconds: float, arguments: argparse.Namespace) -> str:
    """Return the summary table for the pages."""
    figures = {name: verdict.figures for name, verdict in verdicts.items()}
    done, seen, far = (figures[name] for name in ("done", "memory", "weights"))
    grown = _signed(seen["growth"]["median_bytes"]["over_the_run"])
    loss, again = figures["losses"]["largest_loss_difference"], figures["replay"]
    size, kinds, survived, processes = (said for _, said in _what_was_done(figures, seconds))
    return _table(
        title(arguments, seen["budget_bytes"]),
        [
            ("trained", size),
            ("done to it", f"{sum(done['disturbances'].values()):,} things: {kinds}"),
            ("memory ran out and was survived", survived),
            ("training processes", processes),
            ("most private memory; growth over the run", f"{format_bytes(seen['kernel_peak_bytes'])}; {grown}"),
            ("losses, final weights against the undisturbed run", f"within {loss:.1e}; {_far(far)}"),
            (
                "against the same cuts without a limit",
                f"{again['other_losses']} other losses, {again['other_weights']} other tensors",
            ),
            ("not as it should be", _faults(verdicts)),
        ],
    )


def _faults(verdicts: dict[str, Verdict]) -> str:
    return "; ".join(fault for verdict in verdicts.values() for fault in verdict.faults) or "nothing"


def _table(head: str, lines: list[tuple[str, str]]) -> str:
    return "\n".join([f"| {head} | |", "| --- | --- |", *(f"| {what} | {found} |" for what, found in lines)])


def _what_was_done(figures: dict[str, Figures], seconds: float) -> list[tuple[str, str]]:
    done, book = figures["done"], figures["ledger"]
    size = f"{book['steps']:,} steps, {book['samples']:,} samples, {book['epochs']} epochs"
    kinds = ", ".join(f"{number} x {kind}" for kind, number in done["disturbances"].items())
    phases = ", ".join(f"{number} in {phase}" for phase, number in done["ooms_survived"].items())
    return [
        ("disturbed for", f"{seconds / 60:.1f} min: {size}"),
        ("done to it", kinds or "nothing"),
        ("memory ran out and was survived", f"{sum(done['ooms_survived'].values())} times: {phases}"),
        ("training processes", f"{done['processes']}; {done['deaths_explained']} deaths explained by the supervisor"),
    ]


def _memory(seen: Figures) -> list[tuple[str, str]]:
    names = {"least_bytes": "least", "median_bytes": "median", "most_bytes": "most"}

    def grown(where: str) -> str:
        return ", ".join(f"{name} {_signed(seen['growth'][key][where])}" for key, name in names.items())

    files, threads = (seen["growth"][name]["over_the_run"] for name in ("num_files", "num_threads"))
    longest = f"{seen['long_lives']} long lives, the longest {seen['longest_life_seconds'] / 60:.1f} min"
    peaks = f"{format_bytes(seen['seen_peak_bytes'])} seen from outside, {format_bytes(seen['kernel_peak_bytes'])}"
    return [
        ("budget, and the most private memory", f"{format_bytes(seen['budget_bytes'])}; {peaks} by the kernel's count"),
        ("growth in the life of a process", f"{grown('in_a_life')}; {longest}"),
        ("growth over the run", f"{grown('over_the_run')}; open files {files:+d}, threads {threads:+d}"),
    ]


def _results(figures: dict[str, Figures]) -> list[tuple[str, str]]:
    book, loss, again, far = (figures[name] for name in ("ledger", "losses", "replay", "weights"))
    bits = f"same bits until step {loss['same_bits_until_step']:,}"
    after = f"within {loss['largest_loss_difference']:.1e} ({loss['steps_cut_otherwise']:,} steps cut otherwise)"
    twice = f"{book['steps_done_twice']:,} steps done twice, {book['of_them_with_the_same_cut']:,} with the same cut"
    return [
        ("ledger", f"each step once, every sample once an epoch, as undisturbed; {twice}: the same loss"),
        ("losses against the undisturbed run", f"{bits}, then {after}"),
        ("final weights against it", _far(far)),
        (
            "replay with the same cuts, in bits",
            f"{again['other_losses']} other losses (by {again['loss_difference']:.1e} at most), "
            f"{again['other_weights']} other tensors of the last checkpoint (by {again['weights_difference']:.1e})",
        ),
    ]


def _far(weights: Figures) -> str:
    return f"{weights.get('weights_relative_difference', float('nan')):.1e} of their norm"


def _signed(num_bytes: int) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"
