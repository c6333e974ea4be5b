"""The text of a job file that is another with some fields changed, and that means exactly that where it will lie.

It is the text as written with its comments (`plimsoll.records.job_edit`) where that reads as the changed job there;
else, as where paths are meant from another folder, all fields are written out.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from plimsoll.errors import JobError
from plimsoll.records.job import Job
from plimsoll.records.job_edit import edited
from plimsoll.records.job_yaml import parse_value


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
