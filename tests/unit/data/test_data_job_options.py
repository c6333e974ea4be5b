"""What a job says of its texts, in the terms of what reads and cuts them."""

import json
from pathlib import Path

import pytest

from plimsoll.data.job_options import kinds_of_tokens, padding_of, reading_of
from plimsoll.records.job import Job


@pytest.mark.parametrize(
    ("fields", "is_stream", "has_borders"),
    [
        ({}, True, False),
        ({"data": {"stride": 8}}, True, False),
        ({"model": "lstm", "data": {"order": "streams"}}, True, False),
        ({"data": {"pack": True}}, False, False),
        ({"data": {"borders": "sentence"}}, False, True),
        ({"task": "classification"}, False, False),
        ({"task": "classification", "data": {"borders": "paragraph"}}, False, True),
    ],
    ids=str,
)
def test_texts_end_to_end_are_stored_with_what_is_around_them(fields: dict, is_stream: bool, has_borders: bool):
    job = Job.from_fields({"model": "gpt2", **fields, "data": {"train": "a.txt", **fields.get("data", {})}})
    assert kinds_of_tokens(job) == {"is_stream": is_stream, "borders": has_borders}
    assert reading_of(job).unit == "document"


@pytest.mark.parametrize(("said", "padding"), [(7, 7), (None, 3), (-1, 3), ("x", 3)])
def test_rows_are_filled_with_the_checkpoints_own_token(tmp_path: Path, said: object, padding: int):
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": said}))
    assert padding_of(str(tmp_path), 3) == padding
    assert padding_of(str(tmp_path / "absent"), 3) == padding_of({"architecture": "gpt2"}, 3) == 3
