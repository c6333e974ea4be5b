"""Loading of checkpoint folders, one weight at a time, straight into the memory or file that holds it afterwards.

    loaded = load_model("folder", place="mapped")

Host memory holds at most one tensor, a few MiB and, if the device is the CPU, the model. The weights are bitwise equal
to those from ``from_pretrained``. Transformers decides which tensor of the checkpoint belongs to which weight
(`plimsoll.models.skeleton`). A folder with quantized weights of torchao is loaded as saved
(`plimsoll.models.quantized`).

Not handled: checkpoints quantized by other libraries, GGUF files, and models with custom code, except models that
Plimsoll compressed (`plimsoll.compression.methods`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from plimsoll.device.base import backend_for
from plimsoll.device.dtypes import floating_type
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.errors import WeightsError
from plimsoll.files.store import Progress, silent
from plimsoll.models.adapters import with_adapters
from plimsoll.models.quantized import (
    Quantize,
    can_be_quantized,
    coded_value,
    make_coded,
    quantized_weight,
    refuse_changes,
    without_quantization,
)
from plimsoll.models.recurrent.skeleton import recurrent_fields, recurrent_skeleton
from plimsoll.models.skeleton import Derived, Skeleton, Weight, quiet, replace, skeleton_of
from plimsoll.weights.loading import Checkpoint, Coded, Entry, open_checkpoint
from plimsoll.weights.parts import with_parts
from plimsoll.weights.structure import UNMARKED, ShrunkConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Place = Literal["memory", "mapped", "read-only"]
Head = Literal["language-modeling", "classification", "token-classification", "none"]

_WORDS: Mapping[str, tuple[str | None, ...]] = {
    "head": (None, *get_args(Head)),
    "place": get_args(Place),
    "quantize": (None, *get_args(Quantize)),
}

_STAGE = "loading weights"
_SHOWN = 3  # names in a message
_MEAN_ROWS = 1024


@dataclass(frozen=True)
class Loaded:
    """A model with the weights of a checkpoint.

    Attributes:
        model: the model, in evaluation mode.
        missing: names of weights that the checkpoint does not have; transformers has initialised them.
        unexpected: names of tensors of the checkpoint that the model does not use.
        num_bytes: bytes of the tensors that were read or mapped.
        entries: the checkpoint entry of each weight that is mapped from the files, by its name in the model.
        pool: the pool of unnamed files with the weights that are not mapped from the checkpoint; ``None``: no pool.
    """

    model: nn.Module
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    num_bytes: int
    entries: Mapping[str, Entry]
    pool: MappedPool | None


def load_model(
    folder: str | Path,
    *,
    head: Head | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    place: Place = "memory",
    quantize: Quantize | None = None,
    adapters: Sequence[str | Path] | str | Path = (),
    vocab_size: int | None = None,
    allow_missing: bool = False,
    config: PreTrainedConfig | None = None,
    pool: MappedPool | None = None,
    progress: Progress = silent,
) -> Loaded:
    """Load a Hugging Face checkpoint folder, or a folder of one of Plimsoll's recurrent models.

    Args:
        folder: a folder written by ``save_pretrained``, with safetensors or ``torch.save`` files, sharded or not.
        head: the task of the model, which decides its head; ``None``: the model class in its configuration.
        dtype: the dtype of the weights, such as ``torch.bfloat16`` or ``"bf16"``. ``None``: the dtype in the
            configuration, or else the dtype of the most bytes in the files.
        device: the device of the weights.
        place: the place of the weights. ``memory``: the memory of the device. ``mapped``: the memory-mapped checkpoint
            files; only pages that are written take private memory, and the files never change. ``read-only``: the same,
            but no memory limit counts the pages, and a write ends the process (SIGSEGV). Mapped weights are frozen at
            first, and need a CPU.
        quantize: the integers to which torchao quantizes linear layers, except the output layer over the vocabulary and
            tied weights.
        adapters: one or several folders of LoRA adapters, which are merged into the weights in this order.
        vocab_size: the number of tokens, if it differs from the checkpoint's; new rows start as the mean of the others.
        allow_missing: whether weights outside the head may be missing from the checkpoint; missing weights are
            initialised.
        config: a configuration to use in place of the folder's.
        pool: the pool for the weights; ``None``: memory, or a new pool if ``place`` is not ``memory``.
        progress: called with a stage, the bytes loaded so far, and all bytes to load.

    Raises:
        WeightsError: if the checkpoint is damaged, lacks weights or belongs to another model, or an argument is
            unknown.
        DeviceError: if the device does not exist.
        OutputError: if the disk is too full for the weights that cannot be mapped as stored.
    """
    merged = [Path(one) for one in ([adapters] if isinstance(adapters, (str, Path)) else adapters)]
    dtype = None if dtype is None else floating_type(dtype, WeightsError)
    _check_words(head=head, place=place, quantize=quantize)
    _check_combination(quantize, merged)
    _check_target(device, place, vocab_size)
    checkpoint = open_checkpoint(folder)
    fields = recurrent_fields(checkpoint.folder)
    if fields is not None:
        asked = {"head": head, "quantize": quantize, "adapters": merged or None, "vocab_size": vocab_size}
        skeleton = recurrent_skeleton(checkpoint, fields, dtype, asked)
    else:
        config, said = without_quantization(config or config_of(checkpoint.folder), checkpoint)
        if said is not None:
            refuse_changes(checkpoint, config, quantize=quantize, adapters=merged, vocab_size=vocab_size, dtype=dtype)
        chosen = _dtype_of(checkpoint, config, dtype)
        skeleton = skeleton_of(checkpoint, _class_of(config, head, checkpoint.folder), config, chosen, vocab_size)
        if not allow_missing:
            _check_body(skeleton, checkpoint)
    filling = _Filling(skeleton, torch.device(device), place, pool, progress)
    filling.quantize, filling.maps = quantize, place != "memory" and not merged
    filling.coded = checkpoint.coded
    filling.fill()
    if fields is None:
        _finish(skeleton.model, checkpoint.folder, device)
        make_coded(skeleton.model, said)
    model: nn.Module = with_adapters(skeleton.model, merged)
    if place != "memory":
        model.requires_grad_(False)
    return Loaded(
        model.eval(), skeleton.missing, skeleton.unexpected, filling.total_bytes, filling.mapped, filling.pool
    )


def sketch_checkpoint(
    folder: Path, *, head: Head | None = None, dtype: torch.dtype | None = None
) -> tuple[Skeleton, Checkpoint]:
    """Return the model that `load_model` would make, on the meta device, and the opened checkpoint.

    Args:
        folder: see `load_model`.
        head: see `load_model`.
        dtype: see `load_model`.

    Raises:
        WeightsError: see `load_model`.
    """
    checkpoint = open_checkpoint(folder)
    config, said = without_quantization(config_of(checkpoint.folder), checkpoint)
    if said is not None:
        refuse_changes(checkpoint, config, dtype=dtype)
    model_class, chosen = _class_of(config, head, checkpoint.folder), _dtype_of(checkpoint, config, dtype)
    skeleton = skeleton_of(checkpoint, model_class, config, chosen)
    _check_body(skeleton, checkpoint)
    for weight in skeleton.weights.values():
        if weight.entry is not None and weight.entry.name in checkpoint.coded:
            value = coded_value(checkpoint.coded[weight.entry.name], torch.device("meta"), _sketched)
            replace(weight, nn.Parameter(value, requires_grad=False))
    make_coded(skeleton.model, said)
    return skeleton, checkpoint


class _Filling:
    """Fills the weights of a skeleton one by one, in the order of the files."""

    def __init__(
        self, skeleton: Skeleton, device: torch.device, place: Place, pool: MappedPool | None, progress: Progress
    ) -> None:
        self.pool = MappedPool() if pool is None and place != "memory" else pool
        self.mapped: dict[str, Entry] = {}
        self.quantize: Quantize | None = None
        self.coded: Mapping[str, Coded] = {}
        self.maps = place != "memory"
        self._taken: dict[Path, list[tuple[int, int]]] = {}  # the mapped ranges of each file, sorted
        self._skeleton, self._device, self._place, self._progress = skeleton, device, place, progress
        self._direct = sorted((weight for weight in skeleton.weights.values() if weight.entry), key=_place_of)
        self.total_bytes = sum(weight.entry.num_bytes for weight in self._direct if weight.entry)
        self.total_bytes += sum(entry.num_bytes for group in skeleton.derived for entry in group.entries)
        self._done_bytes = self.num_quantized = 0

    def fill(self) -> None:
        kept = _kept_dense(self._skeleton.model) if self.quantize else set()
        for weight in self._direct:
            assert weight.entry is not None
            if weight.entry.name in self.coded:
                self._put(weight, coded_value(self.coded[weight.entry.name], self._device, self._part_of_coded))
            elif self.quantize and self._is_to_be_quantized(weight, kept, self.quantize):
                self._put(weight, self._quantized(weight, weight.entry, self.quantize))
            else:
                self._put(weight, self._value(weight, weight.entry))
        for group in self._skeleton.derived:
            self._derive(group)
        if self._place != "memory" and self.pool is not None:
            self._move_new_weights(self.pool)
        if self.quantize and not self.num_quantized:
            raise WeightsError(
                f"quantize {self.quantize} finds no layer in a {type(self._skeleton.model).__name__}: only "
                "torch.nn.Linear layers are quantized (GPT-2 has none); leave quantize out"
            )
        left = [weight.name for weight in self._skeleton.weights.values() if _is_empty(weight)]
        if left:
            raise WeightsError(
                f"cannot find the tensors of {len(left)} weights of a {type(self._skeleton.model).__name__} in the "
                f"checkpoint ({', '.join(left[:_SHOWN])}): load it with `from_pretrained`"
            )

    def _is_to_be_quantized(self, weight: Weight, kept: set[int], kind: Quantize) -> bool:
        module, name = weight.slots[0]
        is_alone = len(weight.slots) == 1 and name == "weight" and id(module) not in kept
        return is_alone and can_be_quantized(module, kind)

    def _quantized(self, weight: Weight, entry: Entry, kind: Quantize) -> Tensor:
        self.num_quantized += 1
        made = quantized_weight(entry, weight.meta.dtype, kind, self._device, self._report)
        return made if self.pool is None else with_parts(made, self.pool.copy_of)

    def _part_of_coded(self, entry: Entry) -> Tensor:
        """Return one component tensor of a torchao weight, in memory or mapped like the model's other weights."""
        if self._may_map(entry):
            return self._mapped(entry)
        target = self._empty(torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        entry.read_into(target, self._report)
        return target

    def _value(self, weight: Weight, entry: Entry) -> Tensor:
        if entry.shape != tuple(weight.meta.shape):
            return self._resized(weight, entry)
        if entry.dtype == weight.meta.dtype and self._may_map(entry):
            self.mapped[weight.name] = entry
            return self._mapped(entry)
        target = self._empty(weight.meta)
        entry.read_into(target, self._report)
        return target

    def _may_map(self, entry: Entry) -> bool:
        """Return whether an entry can be mapped. If it overlapped a mapped entry, a write would change both."""
        taken = self._taken.get(entry.file, [])
        number = bisect_left(taken, (entry.offset + entry.num_bytes, 0))  # the first range that begins after it
        return self.maps and entry.can_be_mapped and (number == 0 or taken[number - 1][1] <= entry.offset)

    def _mapped(self, entry: Entry) -> Tensor:
        if self._place == "mapped":
            insort(self._taken.setdefault(entry.file, []), (entry.offset, entry.offset + entry.num_bytes))
        self._report(entry.num_bytes)
        return entry.mapped(is_read_only=self._place == "read-only")

    def _resized(self, weight: Weight, entry: Entry) -> Tensor:
        """Return a weight with more or fewer rows than its entry. New rows are the mean of the stored rows."""
        target = self._empty(weight.meta)
        num_kept = min(len(target), entry.shape[0])
        entry.rows(0, num_kept).read_into(target[:num_kept], self._report)
        if len(target) > num_kept:
            total = torch.zeros(target.shape[1:], dtype=torch.float32, device=target.device)
            for begin in range(0, num_kept, _MEAN_ROWS):
                total += target[begin : min(num_kept, begin + _MEAN_ROWS)].sum(dim=0, dtype=torch.float32)
            target[num_kept:] = (total / num_kept).to(target.dtype)
        return target

    def _derive(self, group: Derived) -> None:
        for name, made in group.make(self._part).items():
            weight = self._skeleton.weights.get(name)
            if weight is None:
                continue
            value = made if self._stays(made, weight) else self._empty(weight.meta).copy_(made)
            self._put(weight, value)
        self._report(sum(entry.num_bytes for entry in group.entries))

    def _part(self, entry: Entry, dtype: torch.dtype) -> Tensor:
        """Return an entry as a tensor of this dtype: mapped from the checkpoint, or converted into an unnamed file."""
        if entry.dtype == dtype and entry.can_be_mapped:
            return entry.mapped(is_read_only=True)
        target = (self.pool or MappedPool()).empty_like(torch.empty(entry.shape, dtype=dtype, device="meta"))
        entry.read_into(target)
        return target

    def _stays(self, made: Tensor, weight: Weight) -> bool:
        """Return whether a conversion's result can become the weight without a copy.

        It must own its memory, on the device and not in a file.
        """
        is_own = made.untyped_storage().nbytes() == made.numel() * made.element_size() and made.storage_offset() == 0
        same = (made.shape, made.dtype, made.device) == (weight.meta.shape, weight.meta.dtype, self._device)
        return is_own and same and self.pool is None and made.is_contiguous() and not self._is_mapped(made)

    def _is_mapped(self, made: Tensor) -> bool:
        return not made.untyped_storage().resizable()

    def _empty(self, meta: Tensor) -> Tensor:
        """Return uninitialised memory for a weight, in an unnamed file if there is a pool."""
        if self.pool is not None and self._device.type == "cpu":
            return self.pool.empty_like(meta)
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._device)

    def _put(self, weight: Weight, value: Tensor) -> None:
        is_parameter = isinstance(weight.meta, nn.Parameter)
        learns = weight.meta.requires_grad and self._place == "memory" and type(value) is Tensor
        replace(weight, nn.Parameter(value, requires_grad=learns) if is_parameter else value)

    def _move_new_weights(self, pool: MappedPool) -> None:
        """Move weights that were not in the checkpoint from memory to the files of the pool."""
        for name, parameter in list(self._skeleton.model.named_parameters()):
            if name in self._skeleton.missing and not parameter.is_meta:
                parameter.data = pool.copy_of(parameter.data)

    def _report(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress(_STAGE, self._done_bytes, self.total_bytes)


def _check_words(**given: str | None) -> None:
    for name, word in given.items():
        words = _WORDS[name]
        if word not in words:
            known = ", ".join(str(one) for one in words)
            raise WeightsError(f"{name} is {word!r}, which is not known: give one of {known}")


def _check_target(device: str, place: Place, vocab_size: int | None) -> None:
    if place != "memory" and device.partition(":")[0] != "cpu":
        raise WeightsError(f"place {place} keeps weights in files, which device {device} cannot use: use place memory")
    if device != "meta":
        backend_for(device)
    if vocab_size is not None and vocab_size < 1:
        raise WeightsError(f"vocab_size is {vocab_size}, but must be at least 1: give a larger number, or leave it out")


def _check_combination(quantize: Quantize | None, adapters: Sequence[Path]) -> None:
    if quantize and adapters:
        raise WeightsError(
            f"adapters can only be merged into dense weights, not together with quantize {quantize}: load with "
            f"{len(adapters)} adapters, save the model, and load the saved model with quantize"
        )


def _kept_dense(model: Any) -> set[int]:
    """Return the ``id`` of each module of the output layer, which stays dense, as in transformers.

    The set is empty if the model has no output layer.
    """
    output = model.get_output_embeddings()
    return set() if output is None else {id(one) for one in output.modules()}  # two modules if it is factorized


def _sketched(entry: Entry) -> Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def _place_of(weight: Weight) -> tuple[str, int]:
    assert weight.entry is not None
    return str(weight.entry.file), weight.entry.offset


def _is_empty(weight: Weight) -> bool:
    module, name = weight.slots[0]
    return bool(getattr(module, name).is_meta)


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration of a model folder, also of a model that Plimsoll compressed, without running its code.

    Raises:
        OSError: if there is no configuration, or it cannot be read.
        ValueError: if transformers does not know the architecture.
    """
    from transformers import AutoConfig, PreTrainedConfig

    fields, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    reader: Any = ShrunkConfig if UNMARKED in fields else AutoConfig
    found: PreTrainedConfig = reader.from_pretrained(folder, local_files_only=True)
    return found


def config_of(folder: Path) -> PreTrainedConfig:
    """Read the configuration of a model folder with `read_config`, and raise its errors as `WeightsError`.

    Raises:
        WeightsError: if the configuration cannot be read.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        return read_config(folder)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise WeightsError(
            f"{folder} is not a Hugging Face checkpoint that can be read ({error}): give a folder that "
            "`save_pretrained` wrote"
        ) from None


def _class_of(config: PreTrainedConfig, head: Head | None, folder: Path) -> type[PreTrainedModel]:
    import transformers
    from transformers.models.auto import modeling_auto

    if head is None:
        for name in config.architectures or ():
            if hasattr(transformers, name):
                found: type[PreTrainedModel] = getattr(transformers, name)
                return found
    names = {
        "language-modeling": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "token-classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        "none": modeling_auto.MODEL_MAPPING,
    }
    mapping: Any = names[head or "none"]
    if head == "language-modeling" and config.is_encoder_decoder:
        mapping = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise WeightsError(
            f"{folder} has architecture `{config.model_type}`, for which transformers has no {head} model: give "
            "another checkpoint, or another head"
        )
    chosen: Any = mapping[type(config)]
    result: type[PreTrainedModel] = chosen[0] if isinstance(chosen, tuple) else chosen
    return result


def _dtype_of(checkpoint: Checkpoint, config: PreTrainedConfig, dtype: torch.dtype | None) -> torch.dtype:
    """Return the requested dtype, else the dtype in the configuration, else the dtype of the most stored bytes."""
    chosen = dtype or getattr(config, "dtype", None)
    if chosen is None:
        stored: dict[torch.dtype, int] = {}
        for entry in checkpoint.entries.values():
            if entry.dtype.is_floating_point:
                stored[entry.dtype] = stored.get(entry.dtype, 0) + entry.num_bytes
        chosen = max(stored, key=lambda one: stored[one], default=torch.float32)
    return floating_type(chosen, WeightsError)


def _check_body(skeleton: Skeleton, checkpoint: Checkpoint) -> None:
    """Raise an error if a checkpoint lacks weights outside the head and the pooler.

    A missing pooler is allowed, because many encoders are saved without it.
    """
    model = skeleton.model
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    body = [name for name in skeleton.missing if name.startswith(prefix) and "pooler" not in name.split(".")]
    if body:
        raise WeightsError(
            f"{checkpoint.folder} lacks {len(body)} of the weights of a {type(model).__name__} "
            f"({', '.join(body[:_SHOWN])}{', ...' if len(body) > _SHOWN else ''}; it has {len(checkpoint.entries)} "
            f"tensors, {len(skeleton.unexpected)} of them unused): give the configuration of this checkpoint, or "
            "set allow_missing to initialize the missing weights randomly"
        )


def _finish(model: Any, folder: Path, device: str) -> None:
    from transformers import GenerationConfig

    if torch.device(device).type != "cpu":
        model.to(device)  # weights and buffers that are not in the checkpoint
    model.config.name_or_path = model.name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        with quiet():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
