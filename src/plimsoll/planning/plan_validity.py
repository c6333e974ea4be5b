"""The facts that a plan depends on. A plan is valid only while they are unchanged.

The facts are the versions of libraries that affect memory, the target, and the job without, for example, its budget and
number of steps. They also include which tensors a batch has, whether evaluations run between steps, and the source of a
model that is a user's function. Not covered: modules that this function imports, and the true lengths of samples. A
plan is made for the longest possible sample.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.probe import versions
from plimsoll.errors import InputError
from plimsoll.models.imported import find_imported
from plimsoll.models.names import is_own_function
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan

_VERSIONS = ("plimsoll", "torch", "transformers")
_AT_MOST = ("tokens of the longest row", "samples of an evaluation batch", "tokens of its longest row")
"""Facts that may also be smaller than planned. A plan without them is for the longest possible sample."""
_NOT_OF_A_PLAN = {
    "budget", "checkpoint", "steps", "device", "data", "tokenizer", "seed", "evaluate_every", "distill", "pin",
}  # fmt: skip


def facts_of(job: Job, texts: TextSketch, target: str) -> dict[str, str]:
    """Return the facts that a plan depends on, by name."""
    found = versions()
    facts = {name: found[name] for name in _VERSIONS if name in found}
    fields = job.model_dump(mode="json", exclude=_NOT_OF_A_PLAN)
    facts |= {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for name, value in fields.items()
    }
    facts |= facts_of_texts(texts) | {"target": target}
    facts |= _facts_of_data(job)
    if job.distill is not None:  # without the path of the teacher's folder
        facts["distill"] = json.dumps(job.distill.model_dump(mode="json", exclude={"teacher"}), sort_keys=True)
        facts["configuration of the teacher"] = _hash_of((Path(job.distill.teacher) / "config.json").read_bytes())
    if is_own_function(job.model):
        facts["code of the model"] = _source_of(job.model, texts)
    if isinstance(job.model, str) and Path(job.model).is_dir():
        facts["configuration of the model"] = _hash_of((Path(job.model) / "config.json").read_bytes())
    return facts


def facts_of_texts(texts: TextSketch) -> dict[str, str]:
    """Return the facts about the texts that a plan depends on, as far as they are known."""
    most = (texts.longest, *(texts.held_out or (None, None)))
    facts = {name: str(number) for name, number in zip(_AT_MOST, most, strict=True) if number is not None}
    return {"vocabulary": str(texts.vocab_size), "labels": str(texts.num_labels)} | facts


def _facts_of_data(job: Job) -> dict[str, str]:
    """Return facts about data and evaluations that change a step's allocations. Usual settings are left out."""
    data, facts = job.data, {}
    # An evaluation after the last step runs without optimizer states; between two steps they are in memory.
    facts["evaluates"] = "between steps" if data.validation and job.evaluate_every else str(bool(data.validation))
    if data.order == "streams":
        facts["streams"] = f"reset at {data.reset or 'no borders'}"
    if data.pack:
        facts["samples"] = "packed rows, with positions"
    elif data.has_padding and not job.is_labelled:
        facts["samples"] = "padded texts, with a mask"
    return facts


def facts_of_model(model: nn.Module, optimizer: torch.optim.Optimizer, target: str) -> dict[str, str]:
    """Return the facts that a plan depends on, for a model in a user's program."""
    found = versions()
    shapes = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in model.named_parameters()]
    return {name: found[name] for name in _VERSIONS if name in found} | {
        "model": f"{type(model).__name__} {_hash_of(repr(shapes).encode())}",
        "optimizer": type(optimizer).__name__,
        "target": target,
    }


def differences(made_for: dict[str, str], now: dict[str, str], guessed: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a text for each changed fact that makes a plan invalid.

    ``guessed`` are the names of facts that were guesses when the plan was made. A guess that may still be right is not
    a difference.
    """
    for name in dict.fromkeys((*made_for, *now)):
        before, after = made_for.get(name, "not known"), now.get(name, "not known")
        if name in _AT_MOST:
            differs = name in made_for and name in now and int(after) > int(before)
        elif name in guessed:  # a guessed vocabulary is an upper bound
            differs = name == "vocabulary" and before.isdecimal() and int(before) > int(after)
        else:
            differs = before != after
        if differs:
            yield f"{name} was {before}, is {after}"


def require_prepared_for(plan: Plan, texts: TextSketch) -> None:
    """Check that a plan matches the prepared texts, because some facts about them were guesses when it was made.

    Raises:
        InputError: if the plan does not match; the message names the differences.
    """
    now = facts_of_texts(texts)
    different = list(differences({name: fact for name, fact in plan.made_for.items() if name in now}, now))
    if plan.made_for and different:
        raise InputError(
            f"the plan was made for other data than this run has prepared: {'; '.join(different)}; leave --plan out "
            "to plan with the prepared data"
        )


def _source_of(name: str, texts: TextSketch) -> str:
    find_imported(name, vocab_size=texts.vocab_size, num_labels=texts.num_labels, end_id=texts.end_id)
    source = inspect.getsource(sys.modules[name.partition(":")[0]])
    return _hash_of(source.encode())


def _hash_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()[:12]}"
