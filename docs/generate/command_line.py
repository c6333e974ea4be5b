"""The page of the command line, made from the commands: usage, description, examples and options.

Does NOT cover hidden commands, which Plimsoll starts itself.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import typer

HEAD = """# Command line

Made from `plimsoll COMMAND --help` when this site is built. Every command that gives an answer has the
option `--json`, which prints one record on standard output and nothing else.

[Exit codes](../index.md#exit-codes).
"""


def page(app: typer.Typer) -> str:
    """Return the page of all commands as Markdown."""
    group: Any = typer.main.get_command(app)
    return HEAD + "".join(f"\n{section(name, command)}" for name, command in commands_of(group, "plimsoll"))


def commands_of(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every visible command with its full name, a group before its commands."""
    for own_name, command in group.commands.items():
        if not command.hidden:
            yield f"{name} {own_name}", command
            if hasattr(command, "commands"):
                yield from commands_of(command, f"{name} {own_name}")


def section(name: str, command: Any) -> str:
    """Return the section of a command: usage, text, examples, arguments and options."""
    context = typer.Context(command, info_name=name)
    text, _, examples = (command.help or "").partition("\b\nExamples:\n")
    parts = [f"## {name}", text.strip(), fenced(command.get_usage(context).removeprefix("Usage: "))]
    if examples:
        parts.append(fenced(textwrap.dedent(examples).strip()))
    if options := [record for parameter in command.params if (record := parameter.get_help_record(context))]:
        rows = "\n".join(f"| `{cell(name)}` | {cell(text)} |" for name, text in options)
        parts.append(f"| argument or option | meaning |\n| --- | --- |\n{rows}")
    return "\n\n".join(part for part in parts if part) + "\n"


def fenced(text: str) -> str:
    """Return a block of code."""
    return f"```console\n{text}\n```"


def cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;" if "`" in text else "<").split())
