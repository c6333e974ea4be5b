"""Error messages of every form, with their numbers calculated by hand."""

import json
import re
from pathlib import Path

import pytest

from oom_texts import NEW, TEXTS
from plimsoll.diagnose.parse.event import _SIZE, NOT_OOM, event_of, has_numbers

LABELS = Path(__file__).parents[5] / "shared" / "data" / "oom_texts" / "labels.jsonl"

NUMBERS = ("subformat", "device_index", "tried_to_allocate", "capacity", "free", "allocated_by_pytorch",
           "reserved_unallocated", "reserved_total", "derived_reserved_unallocated", "other_process", "this_process",
           "allowed_limit")  # fmt: skip


@pytest.mark.parametrize("kind", TEXTS)
def test_every_form_has_its_name_and_its_numbers(kind):
    text, numbers = TEXTS[kind]
    event = event_of(text)
    assert (event.kind, event.is_oom, event.text) == (kind, True, text)
    assert {name: getattr(event, name) for name in NUMBERS} == dict.fromkeys(NUMBERS) | numbers
    assert has_numbers(text) == ("tried_to_allocate" in numbers)


def test_a_message_that_was_wrapped_and_quoted_is_read_as_a_whole():
    quoted = "# > " + NEW.replace(" has a total", "\n# > has a total").replace("of which", "\n# > of which")
    assert event_of(quoted).model_copy(update={"text": NEW}) == event_of(NEW)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA driver error: device not ready",
        "java.lang.OutOfMemoryError: Java heap space",
        "OSError: [Errno 28] No space left on device",
        "KeyboardInterrupt",
        "",
    ],
)
def test_what_is_no_lack_of_memory_is_not_called_so(text):
    event = event_of(text)
    assert (event.kind, event.is_oom, event.likely_cause) == (NOT_OOM, False, None)


@pytest.mark.skipif(not LABELS.is_file(), reason="the labelled texts are not beside this repository")
def test_the_labelled_texts():
    names = ("kind", "is_oom", *NUMBERS)
    wrong, num_likely, labels = [], 0, [json.loads(line) for line in LABELS.read_text().splitlines()]
    for label in labels:
        event = event_of((LABELS.parent / label["file"]).read_text(errors="replace"))
        wrong += [(label["file"], name, getattr(event, name)) for name in names if getattr(event, name) != label[name]]
        num_likely += event.likely_cause == label["likely_cause"]
    print(f"{len(labels)} texts, {len(wrong)} wrong fields, {num_likely} causes as labelled")
    assert wrong == []
    assert num_likely >= 0.95 * len(labels)


def test_a_size_begins_where_its_number_begins():
    pattern = re.compile(_SIZE)
    assert pattern.search("1" * 50 + " GiB").start() == 0
    assert pattern.search("1.2.3 GiB") is None
    assert event_of("CUDA out of memory. Tried to allocate 12.50 GiB").tried_to_allocate == 25 << 29
