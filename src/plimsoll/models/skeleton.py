"""Skeletons: transformers models on the meta device, with the checkpoint entry of each weight.

Transformers itself renames, ties, fuses and initialises weights. Its ``from_pretrained`` receives stand-ins for the
tensors of the checkpoint, and turns them into tensors on the meta device. `plimsoll.models.loading` then replaces these
by the weights. Weights that are missing in the checkpoint are initialised in memory, as ``from_pretrained`` does. A
compressed model, whose configuration describes its structure, is built by Plimsoll's own code
(`plimsoll.weights.structure`).

``transformers.core_model_loading`` (5.23) converts weights that are made of several tensors, such as weights of
experts.

Not handled: checkpoints that are already quantized, other custom code in a checkpoint, and weights sharded over
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

_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # makes transformers load without threads, each of which needs a stack

Slot = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer in it."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the skeleton.

    Attributes:
        name: the first name of the weight in the model.
        slots: each module that refers to the weight, with the name of the attribute.
        meta: the weight on the meta device, with its final shape and dtype.
        entry: the checkpoint entry of the weight; ``None`` if it needs a conversion (`Derived`).
    """

    name: str
    slots: tuple[Slot, ...]
    meta: Tensor
    entry: Entry | None


@dataclass(frozen=True)
class Derived:
    """Weights that are converted together, from several checkpoint entries or from parts of one entry.

    Attributes:
        key: the name in the model of the weight that the conversion makes.
        entries: the entries that ``make`` reads.
        make: converts the entries, and returns the weights by name. Its argument is a function that returns the tensor
            of an entry in a dtype.
    """

    key: str
    entries: tuple[Entry, ...]
    make: Callable[[Callable[[Entry, torch.dtype], Tensor]], dict[str, Tensor]]


@dataclass
class Skeleton:
    """A model with weights on the meta device, and the checkpoint entries with the values of these weights.

    ``derived``: the conversions that make weights from entries. ``missing``: the names of weights that the checkpoint
    does not have. ``unexpected``: the names of tensors in the checkpoint that the model does not use.
    """

    model: PreTrainedModel
    weights: dict[str, Weight] = field(default_factory=dict)
    derived: list[Derived] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class _StandIn:
    """The stand-in for a checkpoint tensor. ``from_pretrained`` uses only ``[...]`` and ``.to`` of such a tensor."""

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
    """Build a model without memory, and find the checkpoint entry of each weight.

    Args:
        checkpoint: the opened checkpoint.
        model_class: the class of the model.
        config: the configuration of the model.
        dtype: the dtype of floating-point weights.
        vocab_size: the number of tokens, if it differs from the checkpoint's. Weights with a row for each token then
            have more or fewer rows than their entries.

    Raises:
        WeightsError: if a weight has another shape in the checkpoint, or the model cannot be built.
    """
    stand_ins = {name: _StandIn(entry) for name, entry in checkpoint.entries.items()}
    load: Any = class_for(model_class, config).from_pretrained  # its declared type lacks the loading info
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
                f"`{config.model_type}` cannot be built from {checkpoint.folder} ({str(error).strip()}): check its "
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
    """Replace a weight on the meta device by a tensor, in every module that refers to it."""
    for module, name in weight.slots:
        setattr(module, name, value)  # updates the weight list of recurrent layers too


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress terminal output of transformers in the block. Plimsoll raises errors for the faults that matter."""
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
            f"`{name}` has shape {tuple(stored)} in {checkpoint.folder}, but {tuple(wanted)} in the model of its "
            f"config.json ({len(list(mismatched))} such weights): give the configuration that belongs to the weights"
        )


def slots_of(model: nn.Module) -> Iterator[tuple[str, Slot, Tensor]]:
    """Yield the name, slot and tensor of every parameter and buffer, including tied ones."""
    for prefix, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                yield f"{prefix}.{name}" if prefix else name, (module, name), value


def _weights(model: nn.Module, asked: list[_StandIn]) -> dict[str, Weight]:
    """Return the weights that are on the meta device, each by the first of its names in the model.

    ``asked``: the stand-ins that ``from_pretrained`` has turned into tensors.
    """
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
    """Tie weights that are equal in the checkpoint, as transformers does after comparing values.

    The stand-ins have no values, so transformers could not compare them.
    """
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
    """Let transformers change the size of the vocabulary, and keep the entries of the resized weights."""
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
    """Yield each stand-in with the name of its weight in the model, its pattern, and its converter.

    The pattern is the key of the converter that matched the name in the checkpoint. Without a converter, the pattern is
    "" and the converter ``None``.
    """
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
    """Find, by name, the entries of weights that transformers replaced by new tensors after loading.

    For example, tying weights pads biases, which creates a new tensor even if no element is added.
    """
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
    """Yield the conversions of transformers that make weights from the tensors in ``rest``. Each can run separately."""
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
