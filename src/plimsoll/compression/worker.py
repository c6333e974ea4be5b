"""The process that makes smaller models, and the one that asks it: a question and an answer are each a line of JSON.

Making a model imports torch and holds the weights; asking does neither, and outlives a process that is killed. What is
asked for is a method of `plimsoll.compression.candidates.Workshop`.

Does NOT make two models at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

from plimsoll import errors
from plimsoll.compression.chains import Chain
from plimsoll.errors import InputError, KilledError, PlimsollError
from plimsoll.processes.children import ending_with_this
from plimsoll.records.base import Frozen, Record
from plimsoll.records.job import Job
from plimsoll.records.prediction import Estimate
from plimsoll.records.shrink import Form, InferenceCost, Quality


class ShrinkRequest(Record):
    """What is made smaller, and the data it is judged by: those of a job, or the texts of a file."""

    record_kind: ClassVar[str] = "shrink-request"

    folder: str
    cache: str
    job: Job | None = None
    data: str | None = None
    columns: tuple[str, ...] | None = None
    has_header: bool | None = None
    most_samples: int | None = None


class Offer(Frozen):
    """What a method has for a model: choices that are worth trying, mildest first, or the reason why there are none."""

    method: str
    saves: str
    choices: Chain = ()
    reason: str = ""


class Made(Frozen):
    """A model that was made and judged."""

    form: Form
    file_bytes: int
    weight_bytes: int
    quality: Quality
    has_own_tokenizer: bool


class Source(Frozen):
    """A model, and the tokenizer it reads the tokens of where that is not the original's any more."""

    folder: str
    tokenizer: str | None = None


class ShrinkProcess:
    """The process; it is started with the block and ended with it.

    Args:
        request: a file with a `ShrinkRequest`.
    """

    def __init__(self, request: Path) -> None:
        self._command = [sys.executable, "-m", "plimsoll", "shrink-worker", str(request)]

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, env=ending_with_this(), process_group=0
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def offers(self) -> tuple[Offer, ...]:
        """Ask what each method has for the original."""
        return tuple(Offer.model_validate(one) for one in self._ask("offers"))

    def check(self, chain: Chain) -> None:
        """Have a chain refused that cannot be made of the original, by its configuration alone."""
        self._ask("check", chain=_plain(chain))

    def weight_bytes(self, chain: Chain) -> int | None:
        """Ask what the weights have after a chain; ``None`` if it is refused."""
        found: int | None = self._ask("weight_bytes", chain=_plain(chain))
        return found

    def make(self, source: Source, chain: Chain, target: Path) -> Made:
        """Have a model made in an empty folder."""
        made = self._ask("make", source=source.model_dump(), chain=_plain(chain), target=str(target))
        return Made.model_validate(made)

    def measured(self, source: Source) -> InferenceCost:
        """Have a model applied, in a process of its own, and its peak predicted."""
        return InferenceCost.model_validate(self._ask("measured", source=source.model_dump()))

    def predicted_training(self, source: Source, teacher: Path | None = None) -> Estimate | None:
        """Ask for the peak of a training step of the whole batch; ``None`` where it cannot be dry-run."""
        named = None if teacher is None else str(teacher.absolute())
        found = self._ask("predicted_training", source=source.model_dump(), teacher=named)
        return None if found is None else Estimate.model_validate(found)

    def _ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"ask": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._death(what)
        answer = json.loads(line)
        if "error" in answer:
            _raise(answer)
        return answer["answer"]

    def _death(self, what: str) -> PlimsollError:
        code = self._process.wait()
        number = -code if code < 0 else signal.SIGKILL
        return KilledError(
            f"the process that makes smaller models ended with {code} while it was asked for {what}: free memory on "
            "the machine if it was killed, and give the same command again, which goes on",
            number,
        )


def serve(answers_of: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Answer questions on standard input until it ends; everything else that is printed goes to standard error.

    ``answers_of`` is called behind that change, and may import what prints.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print what nobody asked for
    known = answers_of()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": known[asked.pop("ask")](**asked)}
        except PlimsollError as error:
            answer = {"error": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
        print(json.dumps(answer), file=answers, flush=True)


def _plain(chain: Chain) -> list[dict[str, Any]]:
    return [choice.model_dump() for choice in chain]


def _raise(answer: dict[str, Any]) -> NoReturn:
    """Raise what the process has said."""
    kind: Any = getattr(errors, answer["error"], InputError)
    number = (answer["exit_code"] - 128,) if issubclass(kind, KilledError) else ()
    raise kind(answer["message"], *number)
