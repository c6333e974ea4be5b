"""Planning of inference in a subprocess, so that the planner's memory does not count against the budget.

It runs `plimsoll plan --inference`. Recurrent models are not planned, because they are small. The plan only considers
the text lengths of the first rows. A longer text gets its own pass, and is retried if memory runs out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plimsoll import errors
from plimsoll.errors import BudgetError, InputError, PlimsollError
from plimsoll.records.placement import InferencePlan
from plimsoll.records.units import format_bytes
from plimsoll.report.plan_sheets import budget_word

_LEAST_TOKENS = 64


def length_to_plan(longest_seen_tokens: int, longest_tokens: int | None) -> int:
    """Return the row length to plan for: the longest text, rounded up to a power of two of at least 64 tokens.

    The result is at most the length to which texts are truncated.

    Args:
        longest_seen_tokens: tokens of the longest text that was read.
        longest_tokens: the number of tokens to which texts are truncated; ``None``: not truncated.
    """
    rounded = max(_LEAST_TOKENS, 1 << max(longest_seen_tokens - 1, 0).bit_length())
    return rounded if longest_tokens is None else min(rounded, longest_tokens)


def plan_apart(  # noqa: PLR0917 -- one call
    folder: Path, task: str, length_tokens: int, new_tokens: int, limit_bytes: int, device: str, dtype: str
) -> InferencePlan:
    """Plan inference inside a budget, in a subprocess.

    Args:
        folder: the folder of the model.
        task: the name of the inference task.
        length_tokens: tokens per row, without generated tokens.
        new_tokens: number of tokens to generate for each row.
        limit_bytes: the budget in bytes.
        device: the device that computes.
        dtype: data type of the weights, as for ``--dtype``.

    Raises:
        BudgetError: if even a single row does not fit; the message has the smallest budget.
        InputError: if planning fails.
    """
    with TemporaryDirectory(prefix="plimsoll-") as place:
        plan = Path(place) / "plan.json"
        command = [sys.executable, "-m", "plimsoll", "plan", str(folder), "--inference", "--task", task]
        command += ["--max-length", str(length_tokens), "--budget", str(limit_bytes), "--device", device]
        command += ["--output", str(plan), "--json"]
        command += ["--max-new-tokens", str(new_tokens)] if new_tokens else []
        command += ["--dtype", dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not plan.is_file():
            raise _said(done, folder)
        found = InferencePlan.load(plan)
    least_bytes = found.smallest_budget_bytes
    if least_bytes is not None:
        raise BudgetError(
            f"{folder} cannot be applied to texts of {length_tokens} tokens in {format_bytes(limit_bytes)}: give "
            f"--budget {budget_word(least_bytes)} or more, or a smaller --max-length"
        )
    return found


def _said(done: subprocess.CompletedProcess[str], folder: Path) -> PlimsollError:
    """Return the error that the planning process reported as JSON, or else one with its last line of standard error."""
    try:
        said = json.loads(done.stdout)
        kind: Any = getattr(errors, said["error"])
        message = str(said["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return InputError(f"cannot plan inference with {folder} ({last}): leave --budget out, or correct the cause")
    found: PlimsollError = (kind if issubclass(kind, InputError) else InputError)(message)
    return found
