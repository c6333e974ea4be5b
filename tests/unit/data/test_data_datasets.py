"""The largest batches of datasets: as long as the longest text if texts are short, else as the job specifies.

The tests of data preparation cover the datasets themselves.
"""

from pathlib import Path

import pytest

from plimsoll.data.datasets import with_rows
from plimsoll.data.prepare import prepare
from plimsoll.records.job import Job

TEXTS = {"a": ["one two", "one two three four five"], "b": ["one", "one two three"]}


def write(folder: Path) -> Path:
    for label, texts in TEXTS.items():
        for number, text in enumerate(texts):
            file = folder / label / f"{number}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("fields", "longest", "held_out"),
    [
        ({"task": "classification", "data": {"validation": 0}}, 5, None),
        ({"task": "classification", "data": {"validation": 0}, "sequence_length": 4}, 4, None),
        ({"task": "classification", "data": {"validation": 0.5}}, 5, 2),
        ({"task": "classification", "data": {"validation": 0, "order": "by_length"}, "batch_tokens": 64}, 16, None),
        ({"task": "classification", "data": {"validation": 0, "on_the_fly": True, "long_texts": "truncate"}}, 16, None),
        ({"sequence_length": 4, "data": {"validation": 0}}, 4, None),
    ],
    ids=str,
)
def test_rows_are_as_long_as_the_longest(tmp_path: Path, fields: dict, longest: int, held_out: int | None):
    data = {"train": f"{write(tmp_path / 'texts')}", "unit": "document", **fields["data"]}
    settings = {"model": "gpt2", "tokenizer": {"train": "words"}, "sequence_length": 16}
    settings |= {} if "batch_tokens" in fields else {"batch_size": 2}
    job = Job.from_fields(settings | fields | {"data": data})
    found = with_rows(prepare(job, tmp_path / "cache"), job)
    assert found.longest_row in ({longest} if held_out is None else {longest, 3})  # the longest text may be held out
    assert (found.held_out_batch or (None,))[0] == held_out
