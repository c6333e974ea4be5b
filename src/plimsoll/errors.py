"""The exceptions of Plimsoll, and the exit codes of its command line.

    PlimsollError                          2
    |-- InputError (ValueError)            2   the input cannot be used
    |   |-- JobError                           job.yaml: unknown field, wrong value, contradiction
    |   |-- DataError                          a text that is missing, empty, binary, not UTF-8 or too short
    |   |-- EmbeddingError                     word vectors that are missing, of an unknown format, or match no words
    |   |-- WeightsError                       model weights that are damaged, incomplete, or from another model
    |   |-- BudgetError                        a budget too small for the state before the first step
    |   |   `-- TokenizerMemoryError           a budget or limit too small for training the tokenizer
    |   |-- DeviceError                        a device or limit that this machine does not have
    |   |-- RecordError                        a record file that is damaged, or of an unknown kind or version
    |   |-- OutputError                        an output that exists or cannot be written
    |   `-- CheckpointError                    a checkpoint that is incomplete, missing, or from another job
    |-- NonFiniteLossError (ArithmeticError)  2   the loss is NaN or infinite; nothing was updated
    |-- OutOfMemoryError (MemoryError)     3   no fallback fit; the step was undone
    |   |-- FragmentedHeapError           76   only a new process helps, which the supervisor starts; users see 3
    |   `-- TornStepError                 75   inside optimizer.step(): the supervisor loads a checkpoint; users see 3
    |       `-- AfterUpdateError               after the update: do not repeat the step
    |-- RankLostError                     77   another rank ended or does not answer: restart all ranks
    |-- KilledError                      137   (139 for SIGSEGV) killed by a signal, perhaps for lack of memory
    `-- Interrupted                      130   (143 for SIGTERM) the last step is saved, or the step in the message

Each message contains the values with their units, the reason, and the command or argument to use instead.
"""

from __future__ import annotations

import re
import warnings


class PlimsollWarning(UserWarning):
    """Base class of all warnings that Plimsoll issues."""


class PlimsollError(Exception):
    """Base class of all exceptions that Plimsoll raises on purpose."""

    exit_code = 2


class InputError(PlimsollError, ValueError):
    """The input cannot be used."""

    @classmethod
    def said_by(cls, process_errors: str) -> InputError | None:
        """Return the error that a `plimsoll` command printed on standard error, or ``None`` if it printed none."""
        found = re.search(r"^error: (.*)", process_errors.strip(), re.MULTILINE | re.DOTALL)
        return cls(found[1]) if found else None


class JobError(InputError):
    """A job file has an unknown field, a wrong value or a contradiction."""


class DataError(InputError):
    """A text source is missing, empty, binary, not UTF-8 or too short."""


class EmbeddingError(InputError):
    """Word vectors are missing, damaged, of an unknown format, or do not match the words or the model."""


class WeightsError(InputError):
    """Model weights are missing, damaged, unsafe to unpickle, or do not match the model."""


class BudgetError(InputError):
    """A budget is smaller than the memory in use before the first step."""


class TokenizerMemoryError(BudgetError):
    """There is too little memory to train the tokenizer.

    Args:
        message: the error message.
        budget_bytes: the budget in bytes, or ``None`` if not the budget, but a limit of the process was too small.
    """

    def __init__(self, message: str, budget_bytes: int | None) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes


class DeviceError(InputError):
    """The requested device or limit does not exist on this machine."""


class RecordError(InputError):
    """A record file is damaged, or has an unknown kind or schema version."""


class OutputError(InputError):
    """An output exists already or cannot be written."""


class CheckpointError(InputError):
    """A checkpoint is incomplete, missing, or belongs to another job."""


class NonFiniteLossError(PlimsollError, ArithmeticError):
    """The loss is NaN or infinite. The step has not changed parameters and optimizer states."""


class OutOfMemoryError(PlimsollError, MemoryError):
    """Memory ran out and no fallback fit. The step was undone."""

    exit_code = 3


class TornStepError(OutOfMemoryError):
    """Memory ran out inside ``optimizer.step()``, and no copy could be kept to undo it: reload a checkpoint."""

    exit_code = 75  # EX_TEMPFAIL: the supervisor reloads a checkpoint; users see 3


class AfterUpdateError(TornStepError):
    """Memory ran out after the update, in the scheduler or gradient scaler. Only the update is complete."""


class FragmentedHeapError(OutOfMemoryError):
    """Memory ran out and no fallback helps, because the heap is fragmented. A new process starts with a clean heap."""

    exit_code = 76  # the supervisor starts a new process; users see 3


class RankLostError(PlimsollError):
    """Another rank ended or does not answer. The checkpoints are intact."""

    exit_code = 77  # the supervisor restarts all ranks


class KilledError(PlimsollError):
    """A process of the run was killed or crashed, and restarting it did not help or would not help."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Interrupted(PlimsollError):
    """SIGINT or SIGTERM arrived. The last step was finished and saved, unless the message names another saved step."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


_FORMER_NAMES = {"TokenizerRoomError": "TokenizerMemoryError", "WornProcessError": "FragmentedHeapError"}


def __getattr__(name: str) -> type[PlimsollError]:
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} was renamed to {_FORMER_NAMES[name]}", DeprecationWarning, stacklevel=2)
    found: type[PlimsollError] = globals()[_FORMER_NAMES[name]]
    return found
