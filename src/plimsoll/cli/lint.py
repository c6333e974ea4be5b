"""``plimsoll lint``: mistakes in training code that cost memory, or that silently disable a way to save memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Quiet

if TYPE_CHECKING:
    from plimsoll.records.lint import LintReport

_RULES = "Rules"


def lint(  # noqa: PLR0917 -- typer calls it by name
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Python files, or folders with them.")],
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="RULE", help="Check only this rule; repeatable.", rich_help_panel=_RULES),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="RULE", help="Skip this rule; repeatable.", rich_help_panel=_RULES),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Fix in place the findings that are safe to fix.", rich_help_panel=_RULES)
    ] = False,
    format: Annotated[
        Literal["text", "json", "sarif", "github"],
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="text, json, sarif or github (annotations).",
            rich_help_panel=options.OUTPUT,
        ),
    ] = "text",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find mistakes in training code that cost memory.

    Exit code 1 if there are findings, 2 if a PATH is not valid Python. The
    comment `# plimsoll: ignore` skips its line, or only the rule that it names
    in square brackets. The rules are described in docs/rules.

    \b
    Examples:
      plimsoll lint train.py
      plimsoll lint train.py --fix
      plimsoll lint src scripts --ignore pad_to_max_length
      plimsoll lint . --format sarif > lint.sarif
    """
    from plimsoll.cli.answer import answering
    from plimsoll.cli.output import show
    from plimsoll.diagnose.check_code import check_code
    from plimsoll.report.progress import stages

    with answering("the check", as_json):
        rules = _rules(select, ignore)
        with stages(quiet or as_json or not _is_large(paths)) as report:
            found = check_code(paths, rules=rules, fix=fix, report=lambda done, total: report("checking", done, total))
        if text := _written(found, "record" if as_json else format):
            show(text)
        for one in found.unread if as_json or format != "text" else ():
            print(f"{one.file}: not checked: {one.reason}", file=sys.stderr)
    named = {str(path) for path in paths}
    if any(one.file in named for one in found.unread):
        raise typer.Exit(2)
    if found.findings:
        raise typer.Exit(1)


def _rules(select: list[str] | None, ignore: list[str] | None) -> list[str] | None:
    from plimsoll.diagnose.lint import every_rule
    from plimsoll.errors import InputError

    for name in ignore or ():
        if name not in every_rule():
            raise InputError(f"--ignore {name}: there is no such rule: give one of {', '.join(every_rule())}")
    if select is None and ignore is None:
        return None
    return [name for name in select or every_rule() if name not in (ignore or ())]


def _is_large(paths: list[Path]) -> bool:
    return any(path.is_dir() for path in paths)


def _written(found: LintReport, format: str) -> str:
    from plimsoll.report import lint_formats

    if format == "record":
        return found.to_json()
    written = {
        "text": lint_formats.as_lines,
        "json": lint_formats.as_list,
        "sarif": lint_formats.as_sarif,
        "github": lint_formats.as_annotations,
    }
    return written[format](found)
