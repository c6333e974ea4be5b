"""The worker process that makes smaller models, and its client.

The worker imports torch and holds the weights. The client does neither, and survives if the worker is killed. The
client sends questions: each names a function of `plimsoll.compression.candidates.answers_of` and gives its arguments.
The worker answers with the result. A question and an answer are each one line of JSON.

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
    """A model to make smaller, and its evaluation data: the data of a job, or the texts of the file ``data``.

    ``cache`` is the cache folder for the tokenized data of the job. `plimsoll.compression.evidence.TextEvidence`
    describes the other fields.
    """

    record_kind: ClassVar[str] = "shrink-request"

    folder: str
    cache: str
    job: Job | None = None
    data: str | None = None
    columns: tuple[str, ...] | None = None
    has_header: bool | None = None
    most_samples: int | None = None


class Offer(Frozen):
    """The choices of a method that are worth trying on a model, mildest first, or the reason why it has no choices.

    ``saves`` is a sentence on the savings of the method.
    """

    method: str
    saves: str
    choices: Chain = ()
    reason: str = ""


class Made(Frozen):
    """A model that was made and evaluated.

    ``form`` is the way to load it without Plimsoll, and ``file_bytes`` are the bytes of its weight files.
    ``has_own_tokenizer`` is true if its tokenizer is not the original's.
    """

    form: Form
    file_bytes: int
    weight_bytes: int
    quality: Quality
    has_own_tokenizer: bool


class Source(Frozen):
    """A model folder, and the folder of its tokenizer if this is not the original's tokenizer."""

    folder: str
    tokenizer: str | None = None


class ShrinkProcess:
    """Client of the worker process, as a context manager: entering starts the process, leaving kills it.

    Args:
        request: the path of a file with a `ShrinkRequest`.
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
        """Return for each method its choices for the original, or the reason why it has none."""
        return tuple(Offer.model_validate(one) for one in self._ask("offers"))

    def check(self, chain: Chain) -> None:
        """Raise an error if the original's configuration shows that a chain is impossible.

        Raises:
            WeightsError: if a method refuses its choice.
        """
        self._ask("check", chain=_plain(chain))

    def weight_bytes(self, chain: Chain) -> int | None:
        """Return the bytes of the weights that a chain would leave; ``None`` if a method refuses its choice."""
        found: int | None = self._ask("weight_bytes", chain=_plain(chain))
        return found

    def make(self, source: Source, chain: Chain, target: Path) -> Made:
        """Apply a chain to ``source``, evaluate the model, and save it in the empty folder ``target``."""
        made = self._ask("make", source=source.model_dump(), chain=_plain(chain), target=str(target))
        return Made.model_validate(made)

    def measured(self, source: Source) -> InferenceCost:
        """Measure the peak memory and the time of inference with a model in a new process, and predict the peak."""
        return InferenceCost.model_validate(self._ask("measured", source=source.model_dump()))

    def predicted_training(self, source: Source, teacher: Path | None = None) -> Estimate | None:
        """Predict the peak memory of a training step with the whole batch as one micro-batch.

        Return ``None`` if the evaluation data belong to no job, or if the model does not support a dry run.
        """
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
            f"the process that makes smaller models ended with exit code {code} during `{what}`: if it was killed, "
            "free memory on the machine; run the same command again, which resumes",
            number,
        )


def serve(answers_of: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Answer questions from standard input until it ends. All other output of the process goes to standard error.

    ``answers_of`` returns the function that answers each question, by name. It is called after standard output has been
    redirected, so it may import libraries that print.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
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
    """Raise the error that an answer of the worker describes, as an instance of the same class."""
    kind: Any = getattr(errors, answer["error"], InputError)
    number = (answer["exit_code"] - 128,) if issubclass(kind, KilledError) else ()
    raise kind(answer["message"], *number)
