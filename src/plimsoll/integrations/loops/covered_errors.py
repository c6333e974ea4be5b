"""Wrappers for methods of a Trainer outside of its steps, which turn memory errors into errors with a remedy.

A method that only reads or writes files is safe to repeat, so it is retried once after cached memory has been freed.
Other methods run once. Methods that a version of transformers lacks are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import transformers

from plimsoll.device.base import Backend
from plimsoll.records.run import OomEvent
from plimsoll.step.oom_boundary import Position, attempt, fitting


class _Call(NamedTuple):
    """A method of a Trainer: its description for messages (``what``), an additional remedy, and whether to retry it."""

    what: str
    otherwise: str = ""
    can_repeat: bool = False


_TORN = ", or set save_only_model=True; its folder may be incomplete: remove it before you resume"
_CALLS = {
    "get_batch_samples": _Call(
        "fetching the next batches",
        ", or a smaller per_device_train_batch_size with as many more gradient_accumulation_steps",
    ),
    "save_model": _Call("saving the model", _TORN, can_repeat=True),
    "_save_optimizer_and_scheduler": _Call("saving the optimizer's states", _TORN, can_repeat=True),
    "_save_checkpoint": _Call("saving a checkpoint", _TORN),
    "_load_from_checkpoint": _Call("reading the model of a checkpoint", can_repeat=True),
    "_load_optimizer_and_scheduler": _Call("reading the optimizer's states of a checkpoint", can_repeat=True),
    "_load_best_model": _Call(
        "reading the best model of the training", ", or set load_best_model_at_end=False", can_repeat=True
    ),
    "evaluate": _Call("preparing an evaluation", "; the training state is unchanged"),
    "predict": _Call("preparing predictions", "; the training state is unchanged"),
    # The next two prepare the model and run callbacks. `auto_find_batch_size` would restart the first of them.
    "_inner_training_loop": _Call("training, outside of a step (in a callback, for example)"),
    "train": _Call("preparing to train"),
}


def covered(trainer: transformers.Trainer, backend: Backend) -> dict[str, Callable[..., Any]]:
    """Return, by name, wrapped methods of a trainer that raise `OutOfMemoryError` if memory runs out."""
    present = {name: getattr(trainer, name, None) for name in _CALLS}
    return {name: _covered(method, _CALLS[name], backend) for name, method in present.items() if callable(method)}


def _covered(method: Callable[..., Any], call: _Call, backend: Backend) -> Callable[..., Any]:
    @wraps(method)
    def run(*arguments: Any, **options: Any) -> Any:
        work = partial(method, *arguments, **options)
        if call.can_repeat:
            outcome = attempt(work, backend, Position(phase="checkpoint"))
            if not isinstance(outcome, OomEvent):
                return outcome
            backend.release(last_resort=True)
        return fitting(work, backend, call.what, call.otherwise)

    return run
