"""Edits of job files: unchanged fields stay as they were written."""

import pytest
import yaml

from plimsoll.errors import JobError
from plimsoll.records.job_edit import edited

JOB = """# mine
model: lstm   # small
data: {train: a.txt}
batch_size: 32   # samples
"""


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (JOB, {"batch_size": 8}, JOB.replace("32", "8")),
        (JOB, {"budget.device": "2GiB"}, f"{JOB}budget: {{device: 2GiB}}\n"),
        (JOB.rstrip(), {"pin": ["heap=never"]}, f"{JOB.rstrip()}\npin: [heap=never]\n"),
        ("budget: 1GiB # b\nx: 1\n", {"budget.device": "2GiB"}, "budget: {device: 2GiB} # b\nx: 1\n"),
        ("budget: {device: 1GiB}\n", {"budget.device": "2GiB"}, "budget: {device: 2GiB}\n"),
        (
            "budget:\n  device: 1GiB # d\n  host: 4GiB\nx: 1\n",
            {"budget.device": "2GiB"},
            "budget:\n  device: 2GiB # d\n  host: 4GiB\nx: 1\n",
        ),
        ("budget:\n  device_bytes: 7\nx: 1\n", {"budget.device": 9}, "budget:\n  {device: 9}\nx: 1\n"),
        ("budget:\n\nx: 1\n", {"budget.device": 9}, "budget: {device: 9}\n\nx: 1\n"),
        ("allow:\n- lora\n- adafactor\n\nx: 1 # x\n", {"allow": ["lora"]}, "allow:\n  [lora]\n\nx: 1 # x\n"),
        ("precision: fp32\n", {"precision": "auto", "pin": ["autocast=bf16"]},
         "precision: auto\npin: [autocast=bf16]\n"),
        ("# ä€\nallow: x\n", {"allow": "ö"}, "# ä€\nallow: ö\n"),
    ],
)  # fmt: skip
def test_only_the_value_is_exchanged(text, settings, expected):
    assert edited(text, settings) == expected
    assert isinstance(yaml.safe_load(expected), dict)


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        ("model: [", {"pin": []}, "cannot be read as YAML"),
        ("", {"pin": []}, "not fields like"),
        ("- a\n", {"pin": []}, "not fields like"),
        ("{model: lstm}\n", {"pin": []}, "so `pin` cannot be added"),
        ("pin: a\npin: b\n", {"pin": []}, "`pin` 2 times"),
        ("budget: [1]\n", {"budget.device": 2}, "`budget` has no fields"),
    ],
)
def test_what_cannot_be_changed_in_place(text, settings, told):
    with pytest.raises(JobError, match=told):
        edited(text, settings)
