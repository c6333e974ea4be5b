"""Edits of a job file that change some fields and keep all other text, including comments.

    text = edited(path.read_text(), {"budget.device": 2 << 30, "pin": ["checkpointing=all"]})

Only the text of the values is replaced, at the positions that YAML's parser reports. New fields are appended. Does NOT
keep comments inside a replaced value, and does not check the fields; to check them, parse the result as a job.
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
    """Return a job file's text with the values of some fields changed.

    Args:
        text: the text of the job file.
        settings: new values by field name; ``budget.device`` is the field ``device`` of ``budget``.

    Raises:
        JobError: if the text is not a job file, or a field occurs several times in it.
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
            raise JobError(f"the job file is {text[:40]!r}, so `{names[0]}` cannot be added: write one field per line")
        return f"{lines}{names[0]}: {_written(_nested(names[1:], value))}\n"
    if len(names) == 1:
        return _replaced(text, node, value)
    if isinstance(node, yaml.MappingNode):
        inner = _value_of(node, names[1])
        if inner is not None:
            return _replaced(text, inner, value)
        others = yaml.safe_load(yaml.serialize(node))
        others.pop(f"{names[1]}_bytes", None)  # the name of the field in a run directory's job
        return _replaced(text, node, others | {names[1]: value})
    is_short = SHORT_FORMS.get(names[0]) == names[1] or node.tag.endswith(":null")
    if not is_short or not isinstance(node, yaml.ScalarNode):
        raise JobError(f"`{names[0]}` has no fields, so `{'.'.join(names)}` cannot be set: write it as fields")
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
    kept = old[len(old.rstrip()) :]  # the end mark of a multi-line value is after the line break
    if begin == end:  # the field has no value
        return f"{text[:begin]} {_written(value)}{text[end:]}"
    space = "" if node.start_mark.column else "  "  # a list whose dashes are in column 0 must be indented
    return f"{text[:begin]}{space}{_written(value)}{kept}{text[end:]}"


def _nested(names: list[str], value: Any) -> Any:
    return {names[0]: _nested(names[1:], value)} if names else value


def _written(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def changed_job(source: Path, target: Path, settings: dict[str, Any]) -> str:
    """Return the text for a job file ``target``: the job of ``source`` with the values of some fields changed.

    Comments are kept if possible. Otherwise the text lists every field of the job, without comments.

    Args:
        source: a job file.
        target: the path of the new job file, which the caller writes. Relative paths in the text start from its folder.
        settings: new values by dotted field name, as for ``--set``.

    Raises:
        JobError: if ``source`` is not a job file, or the values are not valid for it.
    """
    changes = tuple(f"{name}={yaml.safe_dump(value, default_flow_style=True)}" for name, value in settings.items())
    wanted = Job.from_yaml(source, changes)
    with suppress(JobError, OSError, ValueError):
        text = edited(source.read_text(encoding="utf-8"), settings)
        if Job.from_fields(parse_value(text), source=str(target), folder=target.parent) == wanted:
            return text
    fields = wanted.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
