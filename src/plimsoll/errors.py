"""Every error Plimsoll raises on purpose, and the exit code the command line gives it.

    PlimsollError                          2
    |-- InputError (ValueError)            2   something the user gave cannot be used
    |   |-- JobError                           job.yaml: unknown field, wrong value, contradiction
    |   |-- DataError                          text that is missing, empty, binary, not UTF-8, too short
    |   |-- EmbeddingError                     word vectors that are missing, of no known format, or fit nothing
    |   |-- WeightsError                       a checkpoint folder that is damaged, incomplete, or of another model
    |   |-- BudgetError                        a budget that cannot hold even the weights
    |   |   `-- TokenizerMemoryError           a budget or limit too small to train the tokenizer
    |   |-- DeviceError                        a device or a limit this machine does not have
    |   |-- RecordError                        a record file of an unknown kind or schema version
    |   |-- OutputError                        an output that exists or cannot be written
    |   `-- CheckpointError                    a checkpoint that is torn, or of another job
    |-- NonFiniteLossError (ArithmeticError)  2   the loss became NaN or infinite; nothing was updated
    |-- OutOfMemoryError (MemoryError)     3   no fallback fit; the step was undone
    |   |-- FragmentedHeapError           76   an OOM with every fallback, under a supervisor that starts a new process
    |   `-- TornStepError                 75   an OOM inside optimizer.step(), to be undone by a reload (3 without one)
    |       `-- AfterUpdateError               an OOM in what follows the update, which is done: do not repeat the step
    |-- RankLostError                     77   another rank ended or does not answer; all begin again, or --resume
    |-- KilledError                      137   (139 for SIGSEGV) the training died of a signal, and not surely of memory
    `-- Interrupted                      130   (143 for SIGTERM) the step is saved, or the message says which

A message says what was attempted, the values with their units, why it failed and what to type instead.
"""

from __future__ import annotations

import re
import warnings


class PlimsollWarning(UserWarning):
    """The category of every warning of Plimsoll's."""


class PlimsollError(Exception):
    """Base of everything raised on purpose."""

    exit_code = 2


class InputError(PlimsollError, ValueError):
    """Something the user gave cannot be used."""

    @classmethod
    def said_by(cls, process_errors: str) -> InputError | None:
        """The refusal that a command of ours has printed on standard error, if it has."""
        found = re.search(r"^error: (.*)", process_errors.strip(), re.MULTILINE | re.DOTALL)
        return cls(found[1]) if found else None


class JobError(InputError):
    """A job file has an unknown field, a wrong value or a contradiction."""


class DataError(InputError):
    """A text source is missing, empty, binary, not UTF-8 or too short."""


class EmbeddingError(InputError):
    """Word vectors are missing, damaged, of no known format, or do not fit the words or the model."""


class WeightsError(InputError):
    """Weights of a model are missing, damaged, need code to be read, or do not fit the model."""


class BudgetError(InputError):
    """A budget cannot hold even what exists before the first step."""


class TokenizerMemoryError(BudgetError):
    """Training the tokenizer does not fit beside what is loaded, in the budget or, with ``None``, in a limit."""

    def __init__(self, message: str, budget_bytes: int | None) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes


class DeviceError(InputError):
    """A device or a limit was asked for that this machine does not have."""


class RecordError(InputError):
    """A record file has an unknown kind or schema version, or is damaged."""


class OutputError(InputError):
    """An output exists already or cannot be written."""


class CheckpointError(InputError):
    """A checkpoint is torn, missing or belongs to another job."""


class NonFiniteLossError(PlimsollError, ArithmeticError):
    """The loss became NaN or infinite; parameters and optimizer states are as before the step."""


class OutOfMemoryError(PlimsollError, MemoryError):
    """Memory ran out and no fallback fit; the step was undone."""

    exit_code = 3


class TornStepError(OutOfMemoryError):
    """Memory ran out inside ``optimizer.step()`` where no copy for the undo could be kept: reload a checkpoint."""

    exit_code = 75  # EX_TEMPFAIL, from the training process to its supervisor, which reloads; users see 3


class AfterUpdateError(TornStepError):
    """Memory ran out in what follows an update (a schedule, a gradient scaler): the update is done, the rest is not."""


class FragmentedHeapError(OutOfMemoryError):
    """Memory ran out where no fallback helps, as in a heap full of holes: a new process begins without them."""

    exit_code = 76  # to the supervisor, which starts a new one; users see 3


class RankLostError(PlimsollError):
    """Another rank ended, or does not answer; the checkpoints are intact."""

    exit_code = 77  # to the supervisor, which starts all of them again


class KilledError(PlimsollError):
    """A process of the run was killed or crashed, again and again or with no use in a new try."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Interrupted(PlimsollError):
    """SIGINT or SIGTERM arrived; the step was finished and saved, unless the message says what is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


_FORMER_NAMES = {"TokenizerRoomError": "TokenizerMemoryError", "WornProcessError": "FragmentedHeapError"}


def __getattr__(name: str) -> type[PlimsollError]:
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is called {_FORMER_NAMES[name]} now", DeprecationWarning, stacklevel=2)
    found: type[PlimsollError] = globals()[_FORMER_NAMES[name]]
    return found
