"""Rehearsals at once: each in a forked process, where there are processors for more than one.

A fork has the model, the techniques and the imports at once, and what it traces does not touch what it has from its
parent. Nothing depends on it: a rehearsal whose process failed, or was killed, is not in the result, and the caller
does it itself, which also brings the error to the user.

Not used where torch sees a GPU: autograd's threads for it do not survive a fork.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from plimsoll.records.trace import Trace
from plimsoll.techniques import Choices

_MOST_PROCESSES = 4  # each has some 100 MiB of its own


def rehearsed_at_once(rehearse: Callable[[Choices], Trace], several: Iterable[Choices]) -> dict[Choices, Trace]:
    """Rehearse several mixes in processes of their own.

    Args:
        rehearse: traces a mix.
        several: the mixes.

    Returns:
        the traces of those that went well, none where there is one processor only.
    """
    waiting, num_processes = list(several), min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    found: dict[Choices, Trace] = {}
    if min(len(waiting), num_processes) < 2 or torch.cuda.is_available():
        return found
    running: dict[Connection, tuple[Choices, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                choices = waiting.pop(0)
                receiver, process = _begin(rehearse, choices)
                running[receiver] = choices, process
            ready = wait(list(running))
            for receiver in [one for one in running if one in ready]:
                choices, process = running[receiver]
                with suppress(EOFError):  # it failed
                    found[choices] = receiver.recv()
                del running[receiver]
                _end(receiver, process)
    finally:
        for receiver, (_, process) in running.items():
            process.kill()
            _end(receiver, process)
    return found


def _begin(rehearse: Callable[[Choices], Trace], choices: Choices) -> tuple[Connection, BaseProcess]:
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with sender:
        process = context.Process(target=_rehearse, args=(rehearse, choices, sender), daemon=True)
        process.start()
    return receiver, process


def _end(receiver: Connection, process: BaseProcess) -> None:
    receiver.close()
    process.join()
    process.close()


def _rehearse(rehearse: Callable[[Choices], Trace], choices: Choices, sender: Connection) -> None:
    """In the forked process, in which another thread of the parent may have held the lock of its output."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        torch.set_num_threads(1)  # the threads of the pool are the parent's
        sender.send(rehearse(choices))
