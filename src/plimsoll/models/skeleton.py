"""A model of transformers without memory, of which each weight knows where in a checkpoint it is.

Transformers itself renames, ties, fuses and initialises: its ``from_pretrained`` is given stand-ins for the tensors of
the checkpoint, which become tensors on the meta device. What is then left to do is to fill them
(`plimsoll.models.loading`). Weights that the checkpoint has none for are initialised, in memory, as it does it. A
model that was made smaller, with a structure noted in its configuration, is built by the code that its folder brings
along, which is our own (`plimsoll.weights.structure`).

Uses ``transformers.core_model_loading`` (5.23) where a weight is made of several, as those of experts are. It does NOT
cover checkpoints that are quantized already, other code that a checkpoint brings along, and weights for several
processes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plimsoll.errors import WeightsError
from plimsoll.weights.structure import class_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from plimsoll.weights.loading.entries import Entry
    from plimsoll.weights.loading.opening import Checkpoint

_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers' own variable: no threads, each of which takes a stack

Slot = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer in it."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the skeleton.

    Attributes:
        name: the first of its names in the model.
        slots: every place in the model where it is.
        meta: the tensor on the meta device, of the shape and type it is to have.
        entry: where its values are; ``None`` if it is made of several entries.
    """

    name: str
    slots: tuple[Slot, ...]
    meta: Tensor
    entry: Entry | None


@dataclass(frozen=True)
class Derived:
    """Weights that are made of several entries, or that are parts of one: names, in the order `make` gives them.

    ``make`` is given what returns an entry's tensor, in the type that was asked for, and returns weights by name.
    """

    key: str
    entries: tuple[Entry, ...]
    make: Callable[[Callable[[Entry, torch.dtype], Tensor]], dict[str, Tensor]]


@dataclass
class Skeleton:
    """A model whose weights are on the meta device, and where their values are."""

    model: PreTrainedModel
    weights: dict[str, Weight] = field(default_factory=dict)
    derived: list[Derived] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class _StandIn:
    """What ``from_pretrained`` is given for a tensor: ``[...]`` and ``.to`` are what it asks of one."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.meta: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    def __getitem__(self, index: Any) -> _StandIn:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        self.meta = torch.empty(self.entry.shape, dtype=dtype or self.entry.dtype, device="meta")
        return self.meta


def skeleton_of(
    checkpoint: Checkpoint,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    vocab_size: int | None = None,
) -> Skeleton:
    """Make a model without memory and find out where in the checkpoint each of its weights is.

    ``vocab_size`` gives it another number of tokens than the checkpoint has: a weight with a row for each of them then
    has an entry of more or fewer rows.

    Raises:
        WeightsError: if a weight has another shape in the checkpoint, or the model cannot be built.
    """
    stand_ins = {name: _StandIn(entry) for name, entry in checkpoint.entries.items()}
    load: Any = class_for(
        model_class, config
    ).from_pretrained  # which has no type for what it returns with the information
    with quiet(), _one_after_the_other():
        try:
            model, info = load(
                None,
                config=config,
                state_dict=stand_ins,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            raise WeightsError(
                f"`{config.model_type}` cannot be built of {checkpoint.folder} ({str(error).strip()}): check its "
                "config.json, or download it again"
            ) from error
    _check_shapes(checkpoint, info["mismatched_keys"])
    made = Skeleton(
        model, missing=tuple(sorted(info["missing_keys"])), unexpected=tuple(sorted(info["unexpected_keys"]))
    )
    asked = [stand_in for stand_in in stand_ins.values() if stand_in.meta is not None]
    made.weights = _weights(model, asked)
    _tie_what_is_equal(made)
    _find_renamed(made, asked)
    if vocab_size is not None:
        _resize(made, asked, vocab_size)
    found = {id(weight.entry) for weight in made.weights.values() if weight.entry is not None}
    rest = [stand_in for stand_in in asked if id(stand_in.entry) not in found]
    if any(weight.entry is None for weight in made.weights.values()):
        made.derived = list(_derived(model, rest))
    return made


def replace(weight: Weight, value: Tensor) -> None:
    """Put a tensor where the weight is on the meta device."""
    for module, name in weight.slots:
        setattr(module, name, value)  # recurrent layers have a list of their weights, which is then kept right


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from writing to the terminal: what matters of it is checked here and raised."""
    from transformers.utils import logging

    verbosity, has_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_progress_bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _one_after_the_other() -> Iterator[None]:
    before = os.environ.get(_SEQUENTIAL)
    os.environ[_SEQUENTIAL] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SEQUENTIAL]
        else:
            os.environ[_SEQUENTIAL] = before


def _check_shapes(checkpoint: Checkpoint, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    for name, stored, wanted in sorted(mismatched):
        raise WeightsError(
            f"`{name}` has shape {tuple(stored)} in {checkpoint.folder}, but {tuple(wanted)} in the model its config "
            f"describes ({len(list(mismatched))} such weights): give the configuration that belongs to the weights"
        )


def slots_of(model: nn.Module) -> Iterator[tuple[str, Slot, Tensor]]:
    """List every parameter and every buffer with its name and its place, also where two are the same tensor."""
    for prefix, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                yield f"{prefix}.{name}" if prefix else name, (module, name), value


def _weights(model: nn.Module, asked: list[_StandIn]) -> dict[str, Weight]:
    """The weights that are on the meta device, by the first of their names."""
    by_storage = {stand_in.meta.untyped_storage()._cdata: stand_in for stand_in in asked if stand_in.meta is not None}
    places: dict[int, list[tuple[str, Slot, Tensor]]] = {}
    for name, slot, value in slots_of(model):
        if value.is_meta:
            places.setdefault(id(value), []).append((name, slot, value))
    weights = {}
    for found in places.values():
        name, _, value = found[0]
        stand_in = by_storage.get(value.untyped_storage()._cdata)
        is_whole = (
            stand_in is not None
            and stand_in.meta is not None
            and (value.shape, value.stride(), value.storage_offset())
            == (stand_in.meta.shape, stand_in.meta.stride(), 0)
        )
        entry = stand_in.entry if stand_in is not None and is_whole else None
        weights[name] = Weight(name, tuple(slot for _, slot, _ in found), value, entry)
    return weights


def _tie_what_is_equal(skeleton: Skeleton) -> None:
    """Tie what transformers would have tied, had it seen the values: both are in the checkpoint and are equal."""
    model: Any = skeleton.model
    by_name: dict[tuple[int, str], Weight] = {}
    for weight in skeleton.weights.values():
        for module, name in weight.slots:
            by_name[id(module), name] = weight
    for target_name, source_name in list((getattr(model, "all_tied_weights_keys", None) or {}).items()):
        target, source = (by_name.get(_slot(model, name)) for name in (target_name, source_name))
        if target is None or source is None or target is source or target.entry is None or source.entry is None:
            continue
        if target.entry.has_bytes_of(source.entry) or _are_equal(target.entry, source.entry):
            for module, name in target.slots:
                module._parameters[name] = source.slots[0][0]._parameters[source.slots[0][1]]
            del skeleton.weights[target.name]
            merged = Weight(source.name, source.slots + target.slots, source.meta, source.entry)
            skeleton.weights[source.name] = merged
            by_name |= {(id(module), name): merged for module, name in merged.slots}
        else:
            model.all_tied_weights_keys.pop(target_name)


def _resize(skeleton: Skeleton, asked: list[_StandIn], vocab_size: int) -> None:
    """Let transformers give the model another vocabulary; the new weights keep where their rows are."""
    entries = {
        (id(module), name): weight.entry for weight in skeleton.weights.values() for module, name in weight.slots
    }
    by_name = {name: entries.get((id(slot[0]), slot[1])) for name, slot, _ in slots_of(skeleton.model)}
    with torch.device("meta"):
        skeleton.model.resize_token_embeddings(vocab_size, mean_resizing=False)
    places = {(id(slot[0]), slot[1]): name for name, slot, _ in slots_of(skeleton.model)}
    resized = {}
    for name, weight in _weights(skeleton.model, asked).items():
        names = [places[id(module), slot] for module, slot in weight.slots]
        entry = weight.entry or next((by_name[one] for one in names if by_name.get(one) is not None), None)
        resized[name] = Weight(name, weight.slots, weight.meta, entry)
    skeleton.weights = resized


def _slot(model: nn.Module, name: str) -> tuple[int, str]:
    path, _, last = name.rpartition(".")
    return id(model.get_submodule(path)), last


def _are_equal(one: Entry, other: Entry) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    values = (entry.mapped(is_read_only=True) if entry.can_be_mapped else entry.read() for entry in (one, other))
    return torch.equal(*values)


def _renamed(model: Any, stand_ins: list[_StandIn]) -> Iterator[tuple[_StandIn, str, str, Any]]:
    """Tensors with what transformers calls them in the model, and which conversion they are a part of."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = model._weight_conversions
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state = model.state_dict()
    for stand_in in sorted(stand_ins, key=lambda one: dot_natural_key(one.entry.name)):
        key, pattern = rename_source_key(stand_in.entry.name, renamings, converters, model.base_model_prefix, state)
        if key not in state and stand_in.entry.name in state:
            key, pattern = stand_in.entry.name, None
        if key in state:
            yield stand_in, key, pattern or "", by_pattern[pattern] if pattern is not None else None


def _find_renamed(skeleton: Skeleton, asked: list[_StandIn]) -> None:
    """Find by its name what was given new memory since: tying pads biases, also by nothing."""
    lost = {weight.name for weight in skeleton.weights.values() if weight.entry is None}
    if not lost:
        return
    at_slot = {(id(module), last): one for one in skeleton.weights.values() for module, last in one.slots}
    owner = {name: at_slot.get((id(module), last)) for name, (module, last), _ in slots_of(skeleton.model)}
    for stand_in, key, _, converter in _renamed(skeleton.model, asked):
        weight = owner.get(key)
        is_lost = converter is None and weight is not None and weight.name in lost
        if is_lost and weight is not None and stand_in.entry.shape == tuple(weight.meta.shape):
            skeleton.weights[weight.name] = Weight(weight.name, weight.slots, weight.meta, stand_in.entry)


def _derived(model: PreTrainedModel, rest: list[_StandIn]) -> Iterator[Derived]:
    """The conversions of transformers that make the other weights, each of which can be run by itself."""
    groups: dict[str, tuple[Any, list[tuple[_StandIn, str]]]] = {}
    for stand_in, key, pattern, converter in _renamed(model, rest):
        if converter is not None:
            groups.setdefault(key, (converter, []))[1].append((stand_in, pattern))
    for key, (converter, parts) in groups.items():
        yield Derived(key, tuple(part.entry for part, _ in parts), _maker(model, key, converter, parts))


def _maker(
    model: PreTrainedModel, key: str, converter: Any, parts: list[tuple[_StandIn, str]]
) -> Callable[[Callable[[Entry, torch.dtype], Tensor]], dict[str, Tensor]]:
    def make(tensor_of: Callable[[Entry, torch.dtype], Tensor]) -> dict[str, Tensor]:
        own = copy.deepcopy(converter)
        for part, pattern in parts:
            assert part.meta is not None
            dtype = part.meta.dtype
            own.add_tensor(key, part.entry.name, pattern, lambda part=part, dtype=dtype: tensor_of(part.entry, dtype))
        made: Mapping[str, Any] = own.convert(key, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    return make
