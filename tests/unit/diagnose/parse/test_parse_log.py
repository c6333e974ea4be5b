"""Logs: the begin and end of a message, its line of code, repetitions, and input that must not break the parser."""

import gzip
import io
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oom_texts import TEXTS
from plimsoll.diagnose.parse.log import read_log

MIB = 1 << 20
TRACEBACK = """epoch 1
Traceback (most recent call last):
  File "scripts/train.py", line 41, in <module>
    loss = step(batch)
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in linear
    return torch._C._nn.linear(input)
"""
OOM = "RuntimeError: CUDA out of memory. Tried to allocate {} MiB (GPU {}; 8.00 GiB total capacity; 6.00 GiB already " \
      "allocated; 1.00 MiB free; 6.25 GiB reserved in total by PyTorch)\n"  # fmt: skip


def log_of(text: str | bytes):
    return read_log(io.BytesIO(text if isinstance(text, bytes) else text.encode()))


def test_the_users_line_is_the_last_one_outside_of_libraries():
    event = log_of(TRACEBACK + OOM.format("20.00", 0)).last
    assert (event.place, event.code, event.line_number) == ("scripts/train.py:41", "loss = step(batch)", 7)
    assert event.tried_to_allocate == 20 * MIB


def test_the_users_line_of_an_abort_is_in_the_dump_of_the_current_thread():
    deep = "".join(
        f'  File "/usr/lib/python3.11/site-packages/a.py", line {number} in encode\n' for number in range(30)
    )
    log = log_of(
        "memory allocation of 4096 bytes failed\nFatal Python error: Aborted\n\n"
        'Thread 0x00007f01 (most recent call first):\n  File "watch.py", line 3 in wait\n\n'
        f'Current thread 0x00007f00 (most recent call first):\n{deep}  File "prepare.py", line 12 in tokens\n'
        '  File "prepare.py", line 40 in <module>\n\nExtension modules: numpy (total: 1)\n'
    )
    assert (log.last.place, log.last.line_number, len(log.events)) == ("prepare.py:12", 1, 1)


def test_ranks_that_say_the_same_are_one_event_and_the_last_one_is_explained():
    log = log_of("".join(OOM.format("20.00", rank) for rank in range(4)) + "go on\n" * 20 + OOM.format("7.00", 0))
    assert [(event.tried_to_allocate // MIB, event.num_times) for event in log.events] == [(20, 4), (7, 1)]
    assert log.last == log.events[1]
    assert log.num_lines == 25


def test_a_traceback_ends_a_message_and_its_lines_are_of_the_next():
    log = log_of("MemoryError\n" + TRACEBACK + OOM.format("20.00", 0))
    assert [event.kind for event in log.events] == ["python_memoryerror", "cuda_allocator_old_format"]
    assert [bool(event.place) for event in log.events] == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        OOM.format("20.00", 0).encode("utf-16"),
        b"\xef\xbb\xbf" + OOM.format("20.00", 0).encode(),
        b"step 1\rstep 2\r" + OOM.format("20.00", 0).replace("\n", "\r\n").encode(),
        OOM.format("20.00", 0).replace("CUDA", "\x1b[31mCUDA\x1b[0m").replace("memory", "\x1b[1mmemory").encode(),
        b"\xff\xfe\xfd\n".replace(b"\xff\xfe", b"\x80\x81") + OOM.format("20.00", 0).encode(),
        b"[rank0]: " + OOM.format("20.00", 0).replace("(GPU", "\n[..] (GPU").encode(),
    ],
    ids=["utf-16", "utf-8 with a mark", "carriage returns", "colours", "no utf-8", "wrapped"],
)  # fmt: skip
def test_however_it_was_written(text):
    assert log_of(text).last.tried_to_allocate == 20 * MIB


@pytest.mark.parametrize("kind", TEXTS)
def test_every_form_is_found_among_other_lines(kind):
    log = log_of("loss 3.1\n" * 50 + TEXTS[kind][0] + "\n" + "loss 3.1\n" * 50)
    assert [event.kind for event in log.events] == [kind]


def test_a_line_without_end_and_many_distinct_errors_are_bounded():
    many = "".join(OOM.format(f"{number}.00", 0) for number in range(1, 1500))
    log = log_of("x" * (1 << 22) + "\n" + many)
    assert len(log.events) == 1000
    assert log.last.tried_to_allocate == 1499 * MIB
    assert all(len(event.text) <= 4000 for event in log.events)


def test_nothing_is_an_empty_log():
    assert log_of("") == log_of(b"")
    assert log_of("").last is None


PIECES = [text for text, _ in TEXTS.values()] + [
    TRACEBACK,
    "\x1b[",
    "\r",
    "GPU ",
    " has a total capacity of ",
    "9" * 300,
]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=40)), max_size=12))
def test_no_text_breaks_it(pieces):
    text = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
    for event in log_of(text).events:
        assert event.is_oom
        assert event.likely_cause is not None


@pytest.mark.slow
def test_a_hundred_thousand_mutated_texts():
    drawn = random.Random(0)
    texts = [text.encode() for text, _ in TEXTS.values()]
    for _ in range(100_000):
        text = bytearray(drawn.choice(texts))
        for _ in range(drawn.randrange(6)):
            place = drawn.randrange(len(text) + 1)
            text[place : place + drawn.randrange(4)] = drawn.choice(
                [b"", b"\n", b"9", b" ", b"\xff", b";", drawn.randbytes(3)]
            )
        log_of(bytes(text))


def test_the_traceback_above_is_kept_and_what_was_said_before_it_is_not():
    caught = (
        "RuntimeError: Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call"
    )
    above = f"Traceback (most recent call last):\n  a\n{caught} last):\n  b"
    log = read_log(io.BytesIO(f"pin_memory=True\n{above}\nRuntimeError: CUDA error: out of memory".encode()))
    assert log.last.above == above
    assert read_log(io.BytesIO(b"MemoryError")).last.above == ""


@pytest.mark.parametrize(
    "text",
    [
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n  if "CUDA out of memory" in str(e): go()\n'
        "NameError: name 'retry' is not defined",
        'except RuntimeError as e:\n    if "CUDA out of memory" in str(e):\n        pass',
        "Tip: If you encounter CUDA out of memory, reduce --batch-size.\nFinished OK",
        "INFO restart policy: on OOMKilled\nINFO no out of memory seen",
        "reason: Completed\n# note: OOMKilled would show exit code 137",
        "INFO: std::bad_alloc handler installed",
        "vm.overcommit: setting oom-kill:constraint policy... done\nslurmstepd: info: oom_kill_step disabled",
    ],
    ids=["code-of-a-traceback", "code", "tip", "policy", "note", "handler", "setting"],
)
def test_talk_of_memory_is_no_error(text):
    assert read_log(io.BytesIO(text.encode())).last is None


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank0]: ",
        "0: ",
        "2026-11-24T01:02:03.456Z ",
        "2026-11-24T01:02:03.456789Z stderr F ",
        "[2026-11-24 01:02:03] ",
    ],
)
def test_the_line_is_found_behind_what_gathers_logs(prefix):
    lines = [
        "Traceback (most recent call last):",
        '  File "/srv/u/train.py", line 12, in <module>',
        "    loss = model(x)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    event = read_log(io.BytesIO("\n".join(prefix + line for line in lines).encode())).last
    assert (event.place, event.code, event.tried_to_allocate) == ("/srv/u/train.py:12", "loss = model(x)", 2 << 30)


def test_what_gzip_packed_is_read_as_far_as_it_goes():
    text = (TRACEBACK + OOM.format("20.00", 0)).encode()
    whole = gzip.compress(text + random.Random(0).randbytes(1 << 16))
    assert log_of(gzip.compress(text)).last == log_of(text).last
    torn = log_of(whole[: len(whole) // 2]).last
    assert (torn.place, torn.tried_to_allocate) == ("scripts/train.py:41", 20 * MIB)
    assert log_of(gzip.compress(text) + b"no gzip").last == log_of(text).last
    assert log_of(b"\x1f\x8b" + text).last is None


def test_lines_of_json_are_the_lines_they_log():
    text = TRACEBACK + OOM.format("20.00", 0)
    docker = "".join(
        json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-11-24T07:00:00.1Z"}) + "\n"
        for line in text.splitlines()
    )
    whole = json.dumps({"level": "error", "message": text, "ts": 1.5}) + "\n"
    cri = "".join(f"2026-11-24T07:00:00.123456789Z stderr F {line}\n" for line in text.splitlines())
    for one in (docker, whole, cri):
        assert log_of(one).last == log_of(text).last


@pytest.mark.parametrize("line", ['{"log": 1}', "{", "{}", "[1]", '{"message": ""}', '{"a":' * 30_000, "{'log': 'x'}"])
def test_what_is_no_record_is_a_line_like_any_other(line):
    log = log_of(line + "\n" + OOM.format("20.00", 0))
    assert log.last.tried_to_allocate == 20 * MIB
    assert log.num_lines >= 2


def test_an_error_behind_the_head_of_a_logger_is_no_talk():
    head = "(Worker rank=1 pid=7) ERROR 07-19 20:22:09 [executor.py:546] "
    text = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert log_of(head + text).last.kind == "cublas_alloc"
    assert log_of(head + "no CUDA out of memory when the batch is small").last is None
