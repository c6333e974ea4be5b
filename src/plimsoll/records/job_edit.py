"""A job file with some fields changed and all else as it was written, comments too.

    text = edited(path.read_text(), {"budget.device": 2 << 30, "pin": ["checkpointing=all"]})

Only the values are exchanged, at the places where YAML's parser has found them; new fields come at the end. Does NOT
keep comments inside a value that is exchanged, and does not check the fields: read what comes of it as a job.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from plimsoll.errors import JobError
from plimsoll.records.job import SHORT_FORMS, Job
from plimsoll.records.job_yaml import parse_value


def edited(text: str, settings: dict[str, Any]) -> str:
    """Return a job file's text with fields set.

    Args:
        text: of the file.
        settings: values by field; ``budget.device`` is a field of ``budget``.

    Raises:
        JobError: if the text is not that of a job file, or one field of it has several values.
    """
    for name, value in settings.items():
        text = _with(text, name.split("."), value)
    return text


def _with(text: str, names: list[str], value: Any) -> str:
    top = _composed(text)
    node = _value_of(top, names[0])
    if node is None:
        lines = text if text.endswith("\n") else f"{text}\n"
        if top.flow_style:
            raise JobError(
                f"the job file is {text[:40]!r}, to which no `{names[0]}` can be added: write a field a line"
            )
        return f"{lines}{names[0]}: {_written(_nested(names[1:], value))}\n"
    if len(names) == 1:
        return _replaced(text, node, value)
    if isinstance(node, yaml.MappingNode):
        inner = _value_of(node, names[1])
        if inner is not None:
            return _replaced(text, inner, value)
        others = yaml.safe_load(yaml.serialize(node))
        others.pop(f"{names[1]}_bytes", None)  # as the job in a run directory has it
        return _replaced(text, node, others | {names[1]: value})
    is_short = SHORT_FORMS.get(names[0]) == names[1] or node.tag.endswith(":null")
    if not is_short or not isinstance(node, yaml.ScalarNode):
        raise JobError(f"`{names[0]}` has no fields, so that `{'.'.join(names)}` cannot be set: write it as fields")
    return _replaced(text, node, {names[1]: value})


def _composed(text: str) -> yaml.MappingNode:
    try:
        top = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise JobError(f"the job file cannot be read as YAML ({error}): see the example in README.md") from None
    if not isinstance(top, yaml.MappingNode):
        raise JobError(f"the job file holds {text[:40]!r}, not fields like `model: ...`: see the example in README.md")
    return top


def _value_of(node: yaml.MappingNode, name: str) -> yaml.Node | None:
    found = [value for key, value in node.value if key.value == name]
    if len(found) > 1:
        raise JobError(f"the job file has `{name}` {len(found)} times: leave one")
    return found[0] if found else None


def _replaced(text: str, node: yaml.Node, value: Any) -> str:
    begin, end = node.start_mark.index, node.end_mark.index
    old = text[begin:end]
    kept = old[len(old.rstrip()) :]  # of a value in several lines the mark is behind the line's end
    if begin == end:  # nothing stands behind the name
        return f"{text[:begin]} {_written(value)}{text[end:]}"
    space = "" if node.start_mark.column else "  "  # of a list whose dashes are below the name
    return f"{text[:begin]}{space}{_written(value)}{kept}{text[end:]}"


def _nested(names: list[str], value: Any) -> Any:
    return {names[0]: _nested(names[1:], value)} if names else value


def _written(value: Any) -> str:
    """One line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def changed_job(source: Path, target: Path, settings: dict[str, Any]) -> str:
    """Return the text of ``target``.

    Args:
        source: a job file.
        target: where the text will be written; not touched.
        settings: values by dotted field, as ``--set`` has them.

    Raises:
        JobError: if ``source`` is no job file, or cannot have these values.
    """
    changes = tuple(f"{name}={yaml.safe_dump(value, default_flow_style=True)}" for name, value in settings.items())
    wanted = Job.from_yaml(source, changes)
    with suppress(JobError, OSError, ValueError):
        text = edited(source.read_text(encoding="utf-8"), settings)
        if Job.from_fields(parse_value(text), source=str(target), folder=target.parent) == wanted:
            return text
    fields = wanted.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
