"""The plan of an application, made in a process of its own: what planning takes is not in the budget of the work.

It is `plimsoll plan --inference` that is run. Does NOT plan recurrent models, which are small, and sees of the lengths
of texts only those of the first rows: a longer one later is a pass of its own, and survives what it may run out of.
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
    """Return the tokens of a row to plan with: the next power of two, within what texts are truncated to."""
    rounded = max(_LEAST_TOKENS, 1 << max(longest_seen_tokens - 1, 0).bit_length())
    return rounded if longest_tokens is None else min(rounded, longest_tokens)


def plan_apart(  # noqa: PLR0917 -- one call
    folder: Path, task: str, length_tokens: int, new_tokens: int, limit_bytes: int, device: str, dtype: str
) -> InferencePlan:
    """Plan how a model is applied inside a budget.

    Raises:
        BudgetError: if nothing fits: it says what would.
        InputError: if it cannot be planned.
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
    """What the process said of itself, which names what is wrong; else that it ended."""
    try:
        said = json.loads(done.stdout)
        kind: Any = getattr(errors, said["error"])
        message = str(said["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return InputError(f"cannot plan how {folder} is applied ({last}): leave --budget out, or correct that")
    found: PlimsollError = (kind if issubclass(kind, InputError) else InputError)(message)
    return found
