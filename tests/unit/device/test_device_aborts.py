"""Rust code that is refused memory under a limit: the process ends, and the place is reported."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from plimsoll.device import aborts
from plimsoll.device.aborts import called_by, explanation, told_where
from plimsoll.device.oom_errors import family_of_text
from processes import run_program

REFUSED = """
from tokenizers import Tokenizer, models, pre_tokenizers
from plimsoll.device.aborts import told_where
from plimsoll.device.cpu.data_limit import limited
from plimsoll.device.process import private_memory

tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
text = "b " * 1_000_000  # some 100 MiB of tokens

def encode():
    return tokenizer.encode(text)

budget_bytes = private_memory().private_bytes + (48 << 20)
with told_where(budget_bytes), limited(budget_bytes):
    encode()
"""


def test_an_abort_is_recognised_and_told_with_the_lines_that_led_there() -> None:
    done = run_program(REFUSED, TOKENIZERS_PARALLELISM="false")
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert family_of_text(done.stderr) == "rust"
    printed, said = done.stderr.split("plimsoll: ")
    assert "Fatal Python error: Aborted" in printed
    assert re.match(r"native code ended this process inside a limit of \d+\.\d MiB \(SIGABRT\)", said)
    assert "Called by: <string>:12 (`encode`)" in said
    for what_to_do in ("give a larger limit", "`batch_size=`", "before `plimsoll.limited(...)`"):
        assert what_to_do in said


def test_a_limit_within_explained_is_the_one_that_is_named() -> None:
    program = REFUSED.replace("with told_where(budget_bytes),", "with told_where(), told_where(budget_bytes),")
    done = run_program(program, TOKENIZERS_PARALLELISM="false")
    assert done.stderr.count("native code ended this process inside a limit of") == 1, done.stderr


def test_a_supervised_process_writes_for_its_supervisor(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    program = f"from plimsoll.device.aborts import tell_supervisor\ntell_supervisor()\n{REFUSED}"
    done = run_program(program, TOKENIZERS_PARALLELISM="false", **{aborts.SUPERVISORS_FILE: str(faults)})
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "Fatal Python error" not in done.stderr  # the supervisor prints it
    assert called_by(faults.read_text(encoding="utf-8")) == "<string>:14 (`encode`)"


def test_a_forked_child_says_at_once_where_it_ended_and_leaves_the_rest_to_its_parent() -> None:
    program = """
import os, sys
from plimsoll.device.aborts import told_where
with told_where(1 << 30):
    if (child := os.fork()) == 0:
        os.abort()
    os.waitpid(child, 0)
    print("the parent goes on", file=sys.stderr, flush=True)
    if (child := os.fork()) == 0:  # which goes on, out of the block
        pass
if child:
    os.waitpid(child, 0)
print("done")
"""
    done = run_program(program)
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr
    assert done.stderr.index("Fatal Python error: Aborted") < done.stderr.index("the parent goes on")
    assert "native code" not in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("Killed", ""),
        (
            "Fatal Python error: Aborted\n",
            "inside a limit of 1.0 GiB (SIGABRT), most likely because the limit refused it",
        ),
        ("Fatal Python error: Segmentation fault\n", "inside a limit of 1.0 GiB (SIGSEGV), perhaps because the limit"),
    ],
)
def test_only_what_ended_the_process_is_explained(text: str, said: str) -> None:
    told = explanation(text, 1 << 30)
    assert said in told
    assert bool(told) == bool(said)
    assert "Called by" not in told


def test_without_a_limit_of_ours_another_is_perhaps_there() -> None:
    told = explanation("Fatal Python error: Aborted\n")
    assert "perhaps because the system, or a limit that was set outside (`ulimit -a`), refused it memory" in told
    assert "plimsoll.limited" not in told


THREADS = """Fatal Python error: Aborted

{first} 0x00007f00 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/a/other.py", line 3 in beside

{last} 0x00007f01 (most recent call first):
  File "/env/lib/python3.11/site-packages/transformers/tokenization.py", line 1091 in _encode_plus
  File "/env/lib/python3.11/site-packages/datasets/arrow_dataset.py", line 3882 in apply_function
  File "/home/a/train.py", line 19 in encode
  File "/home/a/train.py", line 24 in <module>
"""


@pytest.mark.parametrize(
    ("first", "last", "place"),
    [
        ("Thread", "Thread", "/home/a/train.py:19 (`encode`), through datasets"),  # in a thread of its own
        ("Thread", "Current thread", "/home/a/train.py:19 (`encode`), through datasets"),
        ("Current thread", "Thread", "/home/a/other.py:3 (`beside`)"),
    ],
)
def test_the_thread_that_counts_is_the_current_one_or_the_last(first: str, last: str, place: str) -> None:
    assert called_by(THREADS.format(first=first, last=last)) == place


def test_a_line_of_ours_is_named_where_there_is_none_of_the_users() -> None:
    own = aborts.__file__.replace("aborts.py", "cpu.py")
    text = f"""Thread 0x00007f01 (most recent call first):
  File "/env/lib/python3.11/site-packages/tokenizers/models.py", line 9 in train
  File "{own}", line 7 in trains
  File "/env/lib/python3.11/site-packages/click/core.py", line 1 in main
"""
    assert called_by(text) == f"{own}:7 (`trains`), through tokenizers"


def test_nothing_is_started_in_the_first_process_of_a_container_or_where_another_handler_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with told_where(1 << 30):  # pytest's own
        assert aborts.watcher_pids() == set()
    with _without_pytests_handler():
        with told_where(1 << 30):
            (pid,) = aborts.watcher_pids()
            assert psutil.pid_exists(pid)
            with told_where(), told_where(1 << 20):
                assert len(aborts.watcher_pids()) == 2
            assert aborts.watcher_pids() == {pid}
        assert not psutil.pid_exists(pid)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with told_where(1 << 30):
            assert faulthandler.is_enabled()
            assert aborts.watcher_pids() == set()


def test_it_ends_with_the_block_and_leaves_a_handler_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with _without_pytests_handler():
        with told_where():
            assert faulthandler.is_enabled()
            with told_where():
                pass
            assert faulthandler.is_enabled()
        assert not faulthandler.is_enabled()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "__stderr__", None)
            with told_where():
                assert not faulthandler.is_enabled()


@contextmanager
def _without_pytests_handler() -> Iterator[None]:
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    try:
        yield
    finally:
        if was_enabled:
            faulthandler.enable(sys.__stderr__)
