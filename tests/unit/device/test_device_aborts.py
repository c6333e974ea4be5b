"""Code in Rust that is refused memory inside a limit: the process ends, and it is said where."""

from __future__ import annotations

import faulthandler
import signal
import sys

import pytest

from plimsoll.device.aborts import told_where
from plimsoll.device.texts import family_of_text
from processes import run_program

REFUSED = """
from tokenizers import Tokenizer, models, pre_tokenizers
from plimsoll.device.aborts import told_where
from plimsoll.device.data_limit import limited
from plimsoll.device.process import private_memory

tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
text = "b " * 1_000_000  # some 100 MiB of tokens

def encode():
    return tokenizer.encode(text)

with told_where(), limited(private_memory().private_bytes + (48 << 20)):
    encode()
"""


def test_an_abort_is_recognised_and_told_with_the_lines_that_led_there() -> None:
    done = run_program(REFUSED, TOKENIZERS_PARALLELISM="false")
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert family_of_text(done.stderr) == "rust"
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in encode" in done.stderr


def test_it_ends_with_the_block_and_leaves_a_handler_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    was_enabled = faulthandler.is_enabled()  # pytest's own
    faulthandler.disable()
    try:
        with told_where():
            assert faulthandler.is_enabled()
            with told_where():
                pass
            assert faulthandler.is_enabled()
        assert not faulthandler.is_enabled()
        monkeypatch.setattr(sys, "__stderr__", None)
        with told_where():
            assert not faulthandler.is_enabled()
    finally:
        monkeypatch.undo()
        if was_enabled:
            faulthandler.enable(sys.__stderr__)
