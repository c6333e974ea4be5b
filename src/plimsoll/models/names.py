"""Names that torch, transformers and the techniques define, read from their source files without importing them.

Importing torch and transformers takes seconds. That is too long for reporting a typo in a job or explaining a log. If a
source file does not have the expected form, the package is imported after all.

Only names are checked here. Each class checks the values of its fields when an object is built.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeGuard

from plimsoll.errors import InputError, JobError
from plimsoll.records.job import RECUTS, OptimizerChoice, Task
from plimsoll.records.job_yaml import near

_CONFIG_BASE = "PreTrainedConfig"

RECURRENT = ("lstm", "gru", "rnn")
"""Plimsoll's recurrent architectures."""

HEADS: dict[Task, str] = {
    "language-modeling": "language model",
    "classification": "sequence classifier",
    "token-classification": "token classifier",
}
"""The kind of model that a task needs, as a phrase for messages."""

_MAPPINGS: dict[Task, str] = {
    "language-modeling": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}

_SET_BY_JOB = frozenset(
    {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "num_labels", "dtype", "problem_type", "is_decoder"}
)

_REFUSED_OPTIMIZERS = {
    "lbfgs": "it computes the loss several times in one step, and a step here is one pass over its samples",
    "sparseadam": "it takes sparse gradients only, and these models have dense ones",
    "muon": "it takes matrices only, and every model here has vectors (biases, normalisations) as well",
}


def is_own_function(model: str | dict[str, Any]) -> TypeGuard[str]:
    """Return whether the model of a job names a user's function, as ``module:function``, and not a folder."""
    return isinstance(model, str) and ":" in model and not Path(model).is_dir()


def require_model_name(model: str | dict[str, Any], task: Task) -> None:
    """Check that a model names an architecture, a folder or a function.

    Args:
        model: the job's field ``model``; of a dictionary only ``architecture`` is checked.
        task: the task of the job.

    Raises:
        JobError: if the name is unknown; the message suggests the nearest architecture.
    """
    if isinstance(model, str):
        if not (model in RECURRENT or Path(model).is_dir() or is_own_function(model)):
            raise _no_such_model(model, task)
        return
    architecture = model.get("architecture")
    if architecture is None:
        raise JobError(
            f"model: it has the fields {', '.join(model) or 'none'}, but no architecture; add one, for example "
            "`architecture: gpt2`"
        )
    if architecture in RECURRENT:
        return
    known = [*architectures(task), *RECURRENT]
    if architecture not in known:
        raise JobError(
            f"model: there is no {HEADS[task]} of architecture `{architecture}`; {near(str(architecture), known)}"
        )


def require_model_fields(model: str | dict[str, Any]) -> None:
    """Check that the configuration of a transformers architecture has the fields that a job gives its model.

    If the source files do not list the fields, they are checked only when the model is built.

    Args:
        model: the job's field ``model``.
    """
    known = _config_fields(str(model.get("architecture"))) if isinstance(model, dict) else None
    if known is not None and isinstance(model, dict):
        require_fields(str(model["architecture"]), set(model) - {"architecture"}, known)


def require_fields(architecture: str, given: Iterable[str], known: Collection[str]) -> None:
    """Check that the configuration of a model has the given fields, and that none of them is set by the job.

    Args:
        architecture: the architecture of the model.
        given: the names of the fields.
        known: the fields of its configuration, without the fields that all configurations share.

    Raises:
        JobError: if a field is unknown or set by the job; for an unknown field the message names the nearest one.
    """
    for name in given:
        if name in _SET_BY_JOB:
            raise JobError(f"model: `{name}` of `{architecture}` is set from the job and its tokenizer: leave it out")
        if name not in known:
            raise JobError(
                f"model: `{architecture}` has no field `{name}`; {near(name, sorted(set(known) - _SET_BY_JOB))}"
            )
    if "vocab_size" not in known:
        raise JobError(f"model: `{architecture}` holds several models: give the architecture of its text model")


def _no_such_model(name: str, task: Task) -> JobError:
    known = [*architectures(task), *RECURRENT]
    if name in known:
        return JobError(f"model: there is no folder {name}; for a new model write `model: {{architecture: {name}}}`")
    return JobError(
        f"model: there is no folder {name}: download a model first (hf download {name} --local-dir {Path(name).name}), "
        f"or name an architecture; {near(name, known)}"
    )


def require_labels(task: Task, num_labels: int) -> None:
    """Check that the data have at least two labels.

    Raises:
        JobError: if there are fewer; the message contains their number.
    """
    if num_labels < 2:
        raise JobError(
            f"model: {task} needs at least 2 labels, but the data have {num_labels}: add texts with another label"
        )


def own_techniques() -> tuple[str, ...]:
    """Return the names of Plimsoll's techniques, which are the names of the modules in `plimsoll.techniques`."""
    spec = find_spec("plimsoll.techniques")
    assert spec is not None
    return tuple(module.name for module in iter_modules(spec.submodule_search_locations) if not module.ispkg)


def techniques_of_others() -> tuple[EntryPoint, ...]:
    """Return the entry points of techniques in other packages, without loading them.

    An entry point has the name of its technique.
    """
    return tuple(entry_points(group="plimsoll.techniques"))


@cache
def remedies_for(cause: str) -> dict[str, str]:
    """Return the advice of Plimsoll's techniques against a cause of memory problems, by technique, the best first.

    The advice is a change to make by hand in a script, or the technique's summary if it has no such advice. It includes
    a warning if the technique changes the training.

    Args:
        cause: the name of a cause in `plimsoll.diagnose.causes`.
    """
    said = {name: _said_by(name) for name in own_techniques()}
    places = {name: one["remedies"][cause] for name, one in said.items() if cause in one.get("remedies", {})}
    return {name: _advice(said[name]) for name in sorted(places, key=places.__getitem__)}


def _advice(said: Mapping[str, Any]) -> str:
    warning = ", which changes the training" if said["numerics"] == "lossy" else ""
    return f"{said.get('by_hand') or said['summary']}{warning}"


_ADVICE = {"numerics", "summary", "by_hand", "remedies"}  # each is a literal in the technique's class


def _said_by(technique: str) -> dict[str, Any]:
    """Return the fields of a technique's class that `remedies_for` needs, by name, read from its source file."""
    found: dict[str, Any] = {}
    for statement in _statements("plimsoll", f"techniques/{technique}.py"):
        for inner in statement.body if isinstance(statement, ast.ClassDef) else ():
            match inner:
                case (
                    ast.Assign(targets=[ast.Name(id=field)], value=ast.expr() as value)
                    | ast.AnnAssign(target=ast.Name(id=field), value=ast.expr() as value)
                ) if field in _ADVICE:
                    found[field] = ast.literal_eval(value)
    return found


def require_technique(name: str, known: Collection[str] | None = None) -> None:
    """Check that a technique exists.

    Args:
        name: the name of the technique.
        known: the existing techniques; by default all techniques of Plimsoll and of other packages.

    Raises:
        InputError: if it does not exist; the message suggests the nearest name.
    """
    known = _all_techniques() if known is None else known
    if name not in known:
        raise InputError(f"there is no technique `{name}`; {near(name, known)}")


def require_allowed(name: str) -> None:
    """Check that a name in the job's ``allow`` exists; see `plimsoll.planning.inputs.allowed`.

    Raises:
        JobError: if it does not exist; the message suggests the nearest name.
    """
    known = (*RECUTS, *_all_techniques())
    if name not in known:
        raise JobError(f"allow: `{name}` is unknown; {near(name, known)}")


def _all_techniques() -> tuple[str, ...]:
    return (*own_techniques(), *(entry.name for entry in techniques_of_others()))


@cache
def architectures(task: Task) -> tuple[str, ...]:
    """Return the architectures for which transformers has a model for a task."""
    found = dict(_pairs("models/auto/modeling_auto.py", _MAPPINGS[task]))
    if found:
        return tuple(sorted(found))
    from transformers.models.auto import modeling_auto

    return tuple(sorted(getattr(modeling_auto, _MAPPINGS[task])))


def require_optimizer(choice: OptimizerChoice, steps: int | None = None) -> None:
    """Check that an optimizer exists in ``torch.optim``, can be used here, and takes the given arguments.

    Args:
        choice: the optimizer of a job.
        steps: number of steps of the training, which the warm-up must not exceed; ``None``: not checked.

    Raises:
        JobError: if a check fails; for an unknown name the message suggests the nearest optimizer or argument.
    """
    name, known = choice.name.lower(), optimizer_arguments()
    if name in _REFUSED_OPTIMIZERS:
        raise JobError(f"optimizer: `{name}` cannot be used: {_REFUSED_OPTIMIZERS[name]}; use for example `adamw`")
    if name not in known:
        raise JobError(f"optimizer: there is no `{choice.name}` in torch.optim; {near(name, known)}")
    for argument in choice.arguments:
        if argument not in known[name]:
            raise JobError(f"optimizer: `{name}` has no argument `{argument}`; {near(argument, known[name])}")
    if steps is not None and choice.warmup_steps > steps:
        raise JobError(
            f"optimizer: a warm-up of {choice.warmup_steps} steps is longer than the training of {steps} steps: "
            f"set optimizer.warmup_steps to {steps} or less"
        )


@cache
def optimizer_arguments() -> dict[str, tuple[str, ...]]:
    """Return the usable optimizers of ``torch.optim`` by lower-case name, each with its arguments except ``lr``."""
    found = dict(_optimizers_of_sources())
    if not found:
        import inspect

        import torch

        classes = [one for one in vars(torch.optim).values() if isinstance(one, type)]
        optimizers = [
            one for one in classes if issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
        ]
        found = {one.__name__.lower(): tuple(inspect.signature(one).parameters) for one in optimizers}
    return {
        name: tuple(argument for argument in arguments if argument not in {"params", "lr"})
        for name, arguments in found.items()
        if name not in _REFUSED_OPTIMIZERS
    }


def _optimizers_of_sources() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the lower-case name and the arguments of each optimizer; nothing if a source file lacks an ``__init__``."""
    found = []
    for statement in _statements("torch", "optim/__init__.py"):
        match statement:
            case ast.ImportFrom(module=str(module), names=[ast.alias(name=name)]) if module.startswith("torch.optim."):
                arguments = _arguments_of(f"{module.removeprefix('torch.').replace('.', '/')}.py", name)
                if name != "Optimizer" and name[:1].isupper():
                    if arguments is None:
                        return
                    found.append((name.lower(), arguments))
    yield from found


def _arguments_of(file: str, class_name: str) -> tuple[str, ...] | None:
    for statement in _statements("torch", file):
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                    given = inner.args
                    return tuple(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))[1:]
    return None


def _config_fields(architecture: str) -> set[str] | None:
    """Return the fields specific to a configuration class, or ``None`` if the source files do not list them."""
    class_name = dict(_pairs("models/auto/auto_mappings.py", "CONFIG_MAPPING_NAMES")).get(architecture)
    special = dict(_pairs("models/auto/auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"))
    module = special.get(architecture, architecture.replace("-", "_"))
    common = _fields_of_class("configuration_utils.py", _CONFIG_BASE, is_base=True)
    known = class_name and _fields_of_class(f"models/{module}/configuration_{module}.py", class_name)
    return None if not known or common is None else known - common


def _fields_of_class(file: str, name: str, is_base: bool = False) -> set[str] | None:
    """Return the fields of a configuration class and of its base classes, including alternative names of fields.

    The result is ``None`` if the source files do not contain one of these classes.
    """
    statements = _statements("transformers", file)
    found = next((one for one in statements if isinstance(one, ast.ClassDef) and one.name == name), None)
    if found is None:
        return None
    fields = set()
    for statement in found.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation):
                if not ast.unparse(annotation).startswith("ClassVar"):
                    fields.add(field)
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict() as names):
                fields |= set(ast.literal_eval(names))
    for base in [] if is_base else map(ast.unparse, found.bases):
        if base != _CONFIG_BASE:
            inherited = _fields_of_class(_home_of(base, statements, file), base)
            if inherited is None:
                return None
            fields |= inherited
    return fields


def _home_of(name: str, statements: list[ast.stmt], file: str) -> str:
    """Return the file that defines a class: the file that it is imported from, or else ``file`` itself."""
    for statement in statements:
        match statement:
            case ast.ImportFrom(module=str(module), level=2, names=names) if name in [one.name for one in names]:
                return f"models/{module.replace('.', '/')}.py"
    return file


def _pairs(file: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of key and value of the mapping ``name`` in a source file of transformers."""
    for statement in _statements("transformers", file):
        match statement:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(args=[pairs])) if found == name:
                yield from ast.literal_eval(pairs)


@cache
def _statements(package: str, file: str) -> list[ast.stmt]:
    """Return the statements of a source file of a package; an empty list if the file does not exist."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        path = Path(folder, file)
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8")).body
    return []
