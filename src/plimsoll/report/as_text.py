"""Records as rich renderables for the terminal, and the live panel of a training run.

Every function is pure: it returns a renderable and prints nothing. Text from a record is never parsed as rich markup.
The layout suits 80 columns. `plain` returns the text without colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import zip_longest

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plimsoll.records.corpus import CorpusFacts, FeedRates, Inspection, TokenFacts
from plimsoll.records.device import Device, Machine, MemoryUse
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.records.placement import InferencePlan
from plimsoll.records.plan import Plan
from plimsoll.records.prediction import Prediction
from plimsoll.records.run import RunRecord, StepLine
from plimsoll.records.run_comparison import RunComparison
from plimsoll.records.shrink import ShrinkRecord
from plimsoll.records.strategies import Strategies
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.records.watch import WatchRecord
from plimsoll.report import (
    comparison_sheets,
    data_sheets,
    diagnosis_sheets,
    placement_sheets,
    plan_sheets,
    prediction_sheets,
    sheets,
    shrink_sheets,
    strategy_sheets,
    watch_sheets,
)

_WIDTH_COLUMNS = 80
_NEAR_THE_LINE = 0.95  # share of the limit from which a memory bar is red
_MOST_LENGTHS = 5  # columns of sequence lengths in one table
_VERDICT_STYLE = {
    "fits": "green",
    "probably fits": "yellow",
    "probably does not fit": "yellow",
    "does not fit": "red",
}
_PLAN_STYLE = {"fits": "green", "probably fits": "yellow", "impossible": "red", "not predicted": "default"}
_STATUS_STYLE = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}


def plain(renderable: RenderableType) -> str:
    """Return a renderable as text of 80 columns without colours, with a final newline."""
    console = Console(
        file=StringIO(), width=_WIDTH_COLUMNS, color_system=None, force_terminal=False, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()) + "\n"


def run_report(record: RunRecord) -> Group:
    """Return the full report of a run. Empty tables are left out."""
    tables = [
        sheets.oom_sheet(record.oom_events),
        sheets.death_sheet(record),
        plan_sheets.plan_in_force_sheet(record),
        plan_sheets.trial_sheet(record.plan),
    ]
    return _spaced(run_panel(record), run_table(record), *(_table(sheet) for sheet in tables if sheet.rows))


def run_panel(record: RunRecord) -> Panel:
    """Return the headline of a run: name, status, and peak compared with the budget."""
    title = Text.assemble((record.name, "bold"), " ", (record.status, _STATUS_STYLE[record.status]))
    body = [Text(sheets.line_sentence(record))]
    if record.message:
        body.append(Text(record.message))
    return Panel(Group(*body), title=title, title_align="left", box=box.ROUNDED)


def run_table(record: RunRecord) -> Table:
    """Return a table of the key numbers of a run, two per row."""
    return _number_grid(sheets.key_numbers(record))


def _number_grid(numbers: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 1), expand=False)
    for style in ("dim", "bold", "dim", "bold"):
        table.add_column(style=style)
    for left, right in zip_longest(numbers[0::2], numbers[1::2], fillvalue=("", "")):
        table.add_row(*(Text(cell) for cell in (*left, *right)))
    return table


def diagnosis_report(diagnosis: Diagnosis) -> Group:
    """Return the findings of a diagnosis, each with its remedy first and its evidence below."""
    style = "red" if diagnosis.has_answer else "green"
    sentences = [Text(diagnosis_sheets.headline(diagnosis), style), *map(Text, diagnosis.notes)]
    if growth := diagnosis_sheets.growth_sentence(diagnosis):
        sentences.insert(1, Text(growth))
    panel = Panel(Group(*sentences), title=Text(diagnosis.subject, "bold"), title_align="left", box=box.ROUNDED)
    found = diagnosis_sheets.sheets_of(diagnosis)
    return _spaced(panel, *(_table(sheet) for sheet in found if sheet.rows))


def watch_report(record: WatchRecord) -> Group:
    """Return the report of a recording of ``plimsoll watch``. Empty tables are left out."""
    body = Group(*map(Text, watch_sheets.sentences(record)))
    panel = Panel(body, title=Text(f"watch of {record.subject}", "bold"), title_align="left", box=box.ROUNDED)
    return _spaced(panel, *(_table(sheet) for sheet in watch_sheets.sheets_of(record) if sheet.rows))


def comparison_report(comparison: RunComparison) -> Group:
    """Return the report of two runs side by side. Empty tables are left out."""
    said = [comparison_sheets.headline(comparison), comparison_sheets.job_sentence(comparison)]
    names = " and ".join(comparison_sheets.labels(comparison))
    panel = Panel(Group(*map(Text, said)), title=Text(names, "bold"), title_align="left", box=box.ROUNDED)
    *tables, places = comparison_sheets.sheets_of(comparison)
    numbers = tuple(column.title for column in places.columns[3:])
    narrow = _narrowed(places, ("Used for",), ("Module", "Source line"), numbers)
    shown = [
        *(_table(sheet) for sheet in tables if sheet.rows),
        *([_table(narrow, is_wide=True)] if places.rows else []),
    ]
    return _spaced(panel, *shown)


def machine_report(machine: Machine) -> Group:
    """Return the report of a machine: its devices, notes about them, and the library versions."""
    notes = [Text(f"{device.name}: {note}") for device in machine.devices for note in device.notes]
    return _spaced(machine_table(machine), *notes, _table(sheets.version_sheet(machine.versions)))


def machine_table(machine: Machine) -> Table:
    """Return a table with one row per device."""
    return _table(sheets.machine_sheet(machine))


def device_table(device: Device) -> Table:
    """Return a table of one device with one property per row."""
    return _table(sheets.device_sheet(device))


def corpus_report(corpus: CorpusFacts) -> Group:
    """Return the report of a corpus. Empty tables are left out."""
    more = [data_sheets.label_sheet(corpus), data_sheets.tag_sheet(corpus), data_sheets.skipped_sheet(corpus)]
    return _spaced(_table(data_sheets.corpus_sheet(corpus)), *(_table(sheet) for sheet in more if sheet.rows))


def token_report(tokens: TokenFacts) -> Group:
    """Return the report of a corpus and its tokens."""
    return _spaced(corpus_report(tokens.corpus), _table(data_sheets.token_sheet(tokens)))


def inspection_report(inspection: Inspection) -> Group:
    """Return the report of a corpus, its text lengths, and the batching methods."""
    tables = [data_sheets.length_sheet(inspection), data_sheets.filling_sheet(inspection)]
    return _spaced(
        corpus_report(inspection.corpus),
        *(_table(sheet) for sheet in tables),
        *(Text(note) for note in inspection.notes),
        _table(data_sheets.example_sheet(inspection)),
    )


def feed_report(feed: FeedRates) -> Group:
    """Return the report of the data loading speed of a corpus."""
    notes = (Text(note) for note in feed.notes)
    return _spaced(corpus_report(feed.corpus), _table(data_sheets.rate_sheet(feed)), *notes)


def sheets_report(shown: Sequence[sheets.Sheet]) -> Group:
    """Return tables below each other. Empty tables are left out; tables of long text get a blank line between rows."""
    return _spaced(*(_table(sheet, is_wide=sheet.is_prose) for sheet in shown if sheet.rows))


def strategies_report(strategies: Strategies) -> Group:
    """Return the fine-tuning strategies, and below them a line with the options of each, ready to copy."""
    lines = Text("\n".join(strategy_sheets.give_lines(strategies)), overflow="fold")
    tables = sheets_report(strategy_sheets.strategy_sheets(strategies))
    return _spaced(tables, Group(Text(strategy_sheets.GIVE_TITLE, "bold"), lines))


def plan_report(plan: Plan) -> Group:
    """Return the full report of a plan. Empty tables are left out."""
    chosen = _narrowed(plan_sheets.chosen_sheet(plan), ("Technique", "Numerics"), ("Effect", "Reason"))
    lossy_alternatives = _narrowed(
        plan_sheets.alternative_sheet(plan), ("Allow",), ("Choices", "Result"), ("Peak", "Step time")
    )
    rejected = _narrowed(
        plan_sheets.rejected_sheet(plan, plan_sheets.MOST_REJECTED), ("Choices", "Reason"), ("Peak", "Step time")
    )
    numbers, constraints = plan_sheets.key_numbers(plan), plan_sheets.constraints_sentence(plan)
    fallback_schedule = plan_sheets.fallback_sheet(plan)
    is_shown = len(fallback_schedule.rows) > 1 or not chosen.rows
    tables = [
        *(_table(sheet, is_wide=True) for sheet in [chosen] if sheet.rows),
        *([_table(fallback_schedule)] if fallback_schedule.rows and is_shown else []),
        *(_table(sheet) for sheet in [plan_sheets.trial_sheet(plan)] if sheet.rows),
        *(_table(sheet, is_wide=True) for sheet in [lossy_alternatives, rejected] if sheet.rows),
        *(_table(sheet) for sheet in _prediction_tables(plan.prediction) if sheet.rows),
    ]
    return _spaced(
        plan_panel(plan),
        *([_number_grid(numbers)] if numbers else []),
        *([Text(constraints)] if constraints else []),
        *tables,
    )


def plan_panel(plan: Plan) -> Panel:
    """Return the headline of a plan: subject, verdict, notes, and the moment of the peak."""
    sentences = [
        plan_sheets.plain_sentence(plan), plan_sheets.loss_sentence(plan), plan_sheets.alternative_sentence(plan),
        plan_sheets.off_device_sentence(plan), plan_sheets.preparing_sentence(plan), plan_sheets.trial_sentence(plan),
    ]  # fmt: skip
    if plan.prediction is None:
        title, moments = "Plan", [plan_sheets.budget_sentence(plan.budget)]
    else:
        title, moments = plan.prediction.subject, [*prediction_sheets.moment_sentences(plan.prediction)]
        moments += prediction_sheets.exchange_sentences(plan.prediction)
    verdict = Text(plan_sheets.headline(plan), _PLAN_STYLE[plan_sheets.verdict(plan)])
    rest = (Text(sentence) for sentence in (*sentences, *moments) if sentence)
    return Panel(Group(verdict, *rest), title=Text(title, "bold"), title_align="left", box=box.ROUNDED)


def placement_report(plan: InferencePlan) -> Group:
    """Return the full report of an inference plan. Empty tables are left out."""
    verdict = Text(placement_sheets.headline(plan), _PLAN_STYLE[placement_sheets.verdict(plan)])
    rest = (Text(sentence) for sentence in placement_sheets.sentences(plan))
    panel = Panel(Group(verdict, *rest), title=Text(plan.model, "bold"), title_align="left", box=box.ROUNDED)
    tables = (_table(sheet) for sheet in placement_sheets.sheets_of(plan))
    return _spaced(panel, _number_grid(placement_sheets.key_numbers(plan)), *tables)


def shrink_report(record: ShrinkRecord) -> Group:
    """Return the report of a model that was made smaller. Empty tables are left out."""
    return _spaced(Text(shrink_sheets.headline(record), "bold"), sheets_report(shrink_sheets.shrink_sheets(record)))


def _prediction_tables(prediction: Prediction | None) -> list[sheets.Sheet]:
    """Return the tables of a prediction that belongs to a plan; no tables without a prediction."""
    if prediction is None:
        return []
    return [
        prediction_sheets.part_sheet(prediction),
        _largest(prediction),
        prediction_sheets.assumption_sheet(prediction),
    ]


def _largest(prediction: Prediction) -> sheets.Sheet:
    largest = prediction_sheets.largest_sheet(prediction)
    return _narrowed(largest, ("Size",), ("Used for", "Shape"), ("Module", "Source line"))


def prediction_report(prediction: Prediction) -> Group:
    """Return the full report of a prediction. Empty tables are left out."""
    tables = [
        prediction_sheets.part_sheet(prediction),
        _largest(prediction),
        prediction_sheets.answer_sheet(prediction),
    ]
    what_ifs = [_table(sheet) for sheet in prediction_sheets.what_if_sheets(prediction, _MOST_LENGTHS)]
    estimates = _table(_narrowed(prediction_sheets.estimate_sheet(prediction), ("Memory",), ("Likely",), ("Range",)))
    assumptions = prediction_sheets.assumption_sheet(prediction)
    return _spaced(
        prediction_panel(prediction),
        _number_grid(prediction_sheets.key_numbers(prediction)),
        *(_table(sheet) for sheet in tables if sheet.rows),
        *([Group(Text(prediction_sheets.WHAT_IF_TITLE, "bold"), _spaced(*what_ifs))] if what_ifs else []),
        Group(estimates, Text(prediction_sheets.known_how_sentence(prediction))),
        *([_table(assumptions)] if assumptions.rows else []),
    )


def prediction_panel(prediction: Prediction) -> Panel:
    """Return the headline of a prediction: subject, verdict, and the moment of the peak."""
    verdict = Text(prediction_sheets.verdict_sentence(prediction), _VERDICT_STYLE[prediction.verdict])
    said = (*prediction_sheets.moment_sentences(prediction), *prediction_sheets.exchange_sentences(prediction))
    moments = (Text(sentence) for sentence in said)
    title = Text(prediction.subject, "bold")
    return Panel(Group(verdict, *moments), title=title, title_align="left", box=box.ROUNDED)


def _narrowed(sheet: sheets.Sheet, *groups: tuple[str, ...]) -> sheets.Sheet:
    """Stack the columns of each group in one column and drop all other columns, to fit the sheet to 80 characters."""
    places = {column.title: index for index, column in enumerate(sheet.columns)}
    columns = tuple(sheets.Column(", ".join(group), sheet.columns[places[group[0]]].is_number) for group in groups)
    rows = tuple(
        tuple("\n".join(filter(None, (row[places[title]] for title in group))) for group in groups)
        for row in sheet.rows
    )
    return sheets.Sheet(sheet.title, columns, rows)


def _spaced(first: RenderableType, *others: RenderableType) -> Group:
    """Return renderables below each other with a blank line between them."""
    return Group(first, *(Padding(other, (1, 0, 0, 0)) for other in others))


def _table(sheet: sheets.Sheet, *, is_wide: bool = False) -> Table:
    """Return a sheet as a table. ``is_wide`` adds a blank line between rows, for cells of several lines."""
    table = Table(
        title=Text(sheet.title, "bold") if sheet.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        leading=1 if is_wide else 0,
    )
    for column in sheet.columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def progress_line(
    step_line: StepLine,
    total_steps: int,
    limit_bytes: int | None,
    used_bytes: int | None,
    eta_seconds: float | None,
    *,
    unit_name: str = "tokens",
) -> str:
    """Return one log line about the step that just finished.

    Args:
        step_line: the step, numbered from 1.
        total_steps: number of steps in the whole run.
        limit_bytes: the budget, or ``None`` if no budget was set.
        used_bytes: current memory use, or ``None`` if it is not measured.
        eta_seconds: remaining time, or ``None`` if it is not known yet.
        unit_name: unit over which the loss averages, such as ``"tokens"``.
    """
    parts = [f"step {step_line.step}/{total_steps}", f"loss {sheets.format_loss(step_line.loss)}"]
    if used_bytes is not None:
        parts.append(_used_of_limit(used_bytes, limit_bytes))
    if eta_seconds is not None and step_line.step < total_steps:
        parts.append(f"{format_seconds(eta_seconds)} left")
    parts += [_speed(step_line, unit_name), f"micro-batch {step_line.micro_batch}"]
    return "  ".join(parts)


def live_panel(
    name: str,
    step_line: StepLine | None,
    total_steps: int,
    memory: Mapping[str, MemoryUse],
    eta_seconds: float | None,
    *,
    unit_name: str = "tokens",
) -> Panel:
    """Return the live panel of a training run.

    Args:
        name: name of the run.
        step_line: the last finished step, numbered from 1, or ``None`` before the first step ends.
        total_steps: number of steps in the whole run.
        memory: use and limit in bytes, by kind of memory: ``{"device": ..., "host": ...}``. Each kind is one bar.
        eta_seconds: remaining time, or ``None`` if it is not known yet.
        unit_name: unit over which the loss averages, such as ``"tokens"``.
    """
    bars = Table.grid(padding=(0, 2, 0, 0), expand=True)
    bars.add_column(style="dim")
    bars.add_column(ratio=1)
    bars.add_column(justify="right")
    num_done = step_line.step if step_line else 0
    left = "" if eta_seconds is None else f", {format_seconds(eta_seconds)} left"
    bars.add_row("steps", ProgressBar(total_steps, num_done), Text(f"{num_done:,} of {total_steps:,}{left}"))
    for place, use in memory.items():
        bars.add_row(Text(place), _memory_bar(use), Text(_used_of_limit(use.used_bytes, use.limit_bytes)))
    return Panel(
        Group(bars, _step_text(step_line, unit_name)), title=Text(name, "bold"), title_align="left", box=box.ROUNDED
    )


def _memory_bar(use: MemoryUse) -> RenderableType:
    """Return a bar that fills up to the limit, or a text if there is no limit."""
    if use.limit_bytes is None:
        return Text("no limit", "dim")
    style = "red" if use.used_bytes >= _NEAR_THE_LINE * use.limit_bytes else "cyan"
    return ProgressBar(use.limit_bytes, use.used_bytes, complete_style=style, finished_style=style)


def _step_text(step_line: StepLine | None, unit_name: str) -> Text:
    if step_line is None:
        return Text("waiting for the first step", "dim")
    parts = (
        f"loss {sheets.format_loss(step_line.loss)}",
        _speed(step_line, unit_name),
        f"micro-batch {step_line.micro_batch}",
    )
    return Text("   ".join(parts))


def _used_of_limit(used_bytes: int, limit_bytes: int | None) -> str:
    used = format_bytes(used_bytes)
    return used if limit_bytes is None else f"{used} of {format_bytes(limit_bytes)}"


def _speed(step_line: StepLine, unit_name: str) -> str:
    return sheets.format_speed(sheets.step_speed(step_line), unit_name)
