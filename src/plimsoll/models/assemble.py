"""Assembly of a training run from a job and its prepared data: the model, the optimizer, the loss and the loaders.

A run and a prediction share this code, so that both describe the same training. Nothing is trained here.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from plimsoll.data.batch import Units
from plimsoll.data.batches.augment import TokenAugmentation
from plimsoll.data.batches.augment_text import TextAugmentation
from plimsoll.data.batches.batching import Buckets
from plimsoll.data.batches.loader import Loader, warn
from plimsoll.data.batches.order import BlockShuffle
from plimsoll.data.datasets import open_datasets
from plimsoll.data.formats import Reading
from plimsoll.data.samples.packable import packing_fault
from plimsoll.data.samples.teacher_cache import WithTeacher, open_teacher_cache
from plimsoll.data.tokens.store import open_tokens
from plimsoll.data.tokens.tokenizer import open_tokenizer
from plimsoll.device.base import backend_for
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.distributed.ranks import Ranks
from plimsoll.embeddings.opening import dimension_of
from plimsoll.embeddings.subsets import open_rows, take_subset
from plimsoll.embeddings.vocabulary import of_tokenizer
from plimsoll.errors import BudgetError, JobError
from plimsoll.files.store import Progress, silent
from plimsoll.models.build import build_model, loss_of, name_labels, sketch_model
from plimsoll.models.distillation.teacher import digest_of
from plimsoll.models.optimizers import build_optimizer, build_schedule
from plimsoll.models.vectors import fill_embedding, require_fitting, word_embedding
from plimsoll.models.workload import LossFunction, resident_bytes
from plimsoll.records.embeddings import SubsetFacts
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared
from plimsoll.records.units import format_bytes, format_share
from plimsoll.weights.loading import open_checkpoint

_UNSHUFFLED = {"as_is", "streams"}
_FOUND_SHARE = 0.5  # of the tokens of a text; below it, the message suggests a word tokenizer
_SAID_BY_THE_KEY = {"train", "validation", "workers", *(field.name for field in fields(Reading))}
# Fields that do not change the learned weights.
_NOT_LEARNED = {"budget", "checkpoint", "steps", "evaluate_every", "device", "pin", "ranks"}
_COUNTED_TOKENS = 1 << 20  # tokens counted at a time
_LONGEST_ENTRY = 100  # characters of a value in a fingerprint; longer ones are hashed


@dataclass(slots=True)
class Assembled:
    """The model, optimizer, loss and data of a training run, ready to start.

    ``units``: the units over which ``loss`` is a mean. ``files``: the pool of mapped files with the weights; ``None``:
    they are in memory.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    loss: LossFunction
    units: Units
    samples: Any
    loader: Loader
    validation: Any | None
    label_names: tuple[str, ...] = ()
    files: MappedPool | None = None


class Vectors(NamedTuple):
    """The word vectors of a job: their folder and digest, and a sentence that reports how many words were found."""

    folder: str
    digest: str
    sentence: str


def prepare_vectors(job: Job, prepared: Prepared, cache: Path, progress: Progress = silent) -> Vectors | None:
    """Extract the vectors of a job's tokens from its file of word vectors. Return ``None`` if the job has no vectors.

    Raises:
        EmbeddingError: if the file cannot be used, or has no vector for any token.
        OutputError: if the cache cannot be written.
    """
    source = job.embeddings
    if source is None:
        return None
    backend = open_tokenizer(Path(prepared.tokenizer_folder)).backend
    words = of_tokenizer(backend, "the tokenizer of the job")
    if prepared.train.tokens_folder is not None:
        words = replace(words, counts=token_counts(Path(prepared.train.tokens_folder), len(words)))
    found = take_subset(source.path, words, missing=source.missing, seed=job.seed, cache=cache, progress=progress)
    return Vectors(found.facts.folder, found.digest, _vectors_sentence(found.facts, job))


def token_counts(folder: Path, num_words: int) -> NDArray[np.int64]:
    """Count the occurrences of each of the first ``num_words`` token ids in a folder of tokens."""
    tokens = open_tokens(folder).tokens
    counts = np.zeros(num_words, np.int64)
    for begin in range(0, len(tokens), _COUNTED_TOKENS):
        counts += np.bincount(tokens[begin : begin + _COUNTED_TOKENS], minlength=num_words)
    return counts


def _vectors_sentence(facts: SubsetFacts, job: Job) -> str:
    share = facts.num_found / max(facts.num_words, 1)
    sentence = f"vectors: {facts.num_found:,} of {facts.num_words:,} words found"
    if facts.num_tokens:
        share = (facts.num_hit_tokens or 0) / facts.num_tokens
        sentence += f", {format_share(share, 1)} of the text"
        if facts.misses:
            sentence += f"; not found, most frequent first: {', '.join(word for word, _ in facts.misses[:5])}"
    if share < _FOUND_SHARE and job.tokenizer.train == "bpe":
        sentence += "; a tokenizer whose tokens are words finds more: `tokenizer: {train: words}`"
    return sentence


def choose_device(job: Job) -> str:
    """Return the device of the job. ``auto`` means CUDA if it is available, and the CPU otherwise."""
    if job.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return job.device


def assemble(
    job: Job,
    prepared: Prepared,
    device: str,
    on_event: Callable[[str], None] = warn,
    oom_kills: Callable[[], int | None] = lambda: None,
    *,
    in_files: bool = False,
    put: Callable[[nn.Module, str], object] = nn.Module.to,
    ranks: Ranks | None = None,
) -> Assembled:
    """Build the model, optimizer, loss and loaders of ``job`` on ``device``, seeded by the job.

    Args:
        job: the job.
        prepared: the prepared data of the job.
        device: the device that trains.
        on_event: called with messages about the data-loading processes; by default they become warnings.
        oom_kills: returns the number of processes killed by the kernel's OOM killer, to recognize the death of a
            data-loading process.
        in_files: build the model in mapped files instead of memory, with the same values.
        put: moves the model to the device; a technique may leave some of the parameters on the host.
        ranks: the processes that train together; the loader yields this rank's part of each batch.

    Raises:
        JobError: if the model or the optimizer cannot be built as described.
        OutputError: if the disk is too full for ``in_files``.
        DataError: if there are fewer samples than one batch.
    """
    _seed(job.seed)
    training, validation = open_datasets(prepared, job)
    has_teacher_cache = job.distill is not None and job.distill.cache is not None
    samples = (
        WithTeacher(training, open_teacher_cache(teacher_cache_folder(job, prepared)))
        if has_teacher_cache
        else training
    )
    loader = loader_of(job, samples, on_event, oom_kills, ranks)
    files = MappedPool() if in_files else None
    model = build_model(job, prepared.vocab_size, prepared.num_labels, prepared.end_id, prepared.pad_id, files=files)
    if prepared.vectors_folder is not None:
        fill_embedding(word_embedding(model, prepared.vocab_size), open_rows(Path(prepared.vectors_folder)))
    name_labels(model, prepared.label_names)
    put(model, device)
    model.train()
    _require_kernels(model, job.own_precision, device)
    _require_apart(job, model)
    optimizer = build_optimizer(job.optimizer, model.parameters())
    loss, units = loss_of(job.task)
    schedule = build_schedule(job.optimizer, optimizer, job.steps)
    return Assembled(model, optimizer, schedule, loss, units, training, loader, validation, prepared.label_names, files)


def teacher_cache_folder(job: Job, prepared: Prepared) -> Path:
    """Return the folder of the teacher cache for the training samples of a job.

    Its name is a hash of everything that decides its content: the teacher, the samples, the temperature, and how many
    of the teacher's tokens are kept at each position.

    Raises:
        JobError: if the teacher cannot be read.
    """
    distill, data = job.distill, job.data
    assert distill is not None
    parts = [
        digest_of(Path(distill.teacher)), distill.form == "int8", distill.temperature, distill.cache, job.task,
        prepared.key, job.sequence_length, data.stride, data.pack, str(data.validation), job.draws_held_out, job.seed,
    ]  # fmt: skip
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(prepared.tokenizer_folder).parent / f"teacher-{name}"


def loader_of(
    job: Job,
    samples: Any,
    on_event: Callable[[str], None] = warn,
    oom_kills: Callable[[], int | None] = lambda: None,
    ranks: Ranks | None = None,
) -> Loader:
    """Create the loader that batches the samples of a job.

    Args:
        job: the job.
        samples: the training samples of the job.
        on_event: see `assemble`.
        oom_kills: see `assemble`.
        ranks: see `assemble`.

    Raises:
        DataError: if there are fewer samples than one batch, or a sample is longer than ``batch_tokens`` allow.
    """
    data = job.data
    batches: int | Buckets = job.batch_size
    if data.order == "by_length":
        batches = Buckets(max_tokens=job.batch_tokens) if job.batch_tokens else Buckets(batch_size=job.batch_size)
    shuffle = BlockShuffle(samples.block_samples) if data.order == "blocks" else data.order not in _UNSHUFFLED
    free_bytes = _room_for_workers_bytes(job) if data.workers == "auto" else None
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    return Loader(
        samples,
        batches,
        job.seed,
        shuffle,
        rank=rank,
        world_size=world_size,
        workers=data.workers,
        host_budget_bytes=free_bytes,
        on_event=on_event,
        oom_kills=oom_kills,
    )


def _room_for_workers_bytes(job: Job) -> int:
    """Return the bytes of host memory for data-loading processes: half of the bytes that are free under the budget.

    The other half is for the training.
    """
    host = backend_for("cpu").probe()
    budget_bytes = job.budget.host_bytes
    left_bytes = host.free_bytes if budget_bytes is None else min(host.free_bytes, budget_bytes - host.use.used_bytes)
    return max(left_bytes, 0) // 2


def require_buildable(job: Job) -> None:
    """Check, before the data are prepared, that model, optimizer and augmentation can be built. Nothing is allocated.

    Checks that depend on the data are left out (see `sketch_model`).

    Raises:
        JobError: if the model or the optimizer cannot be built.
        DataError: if the synonyms or a function of the augmentation cannot be used.
    """
    if job.data.augment:
        TextAugmentation(job.data.augment, job.seed)
        TokenAugmentation(job.data.augment, job.seed, special_ids=(), mask_id=0, sequence_length=job.sequence_length)
    require_vectors(job)
    model = sketch_model(job)
    if model is not None:
        _require_kernels(model, job.own_precision, choose_device(job))
        if any(
            isinstance(module, nn.RNNBase) for module in model.modules()
        ):  # other models must be tested with weights
            _require_apart(job, model)
    optimizer = build_optimizer(job.optimizer, [nn.Parameter(torch.zeros(()))])
    build_schedule(job.optimizer, optimizer, job.steps)


def require_vectors(job: Job) -> None:
    """Check that the word vectors of a job can be read and fit its model.

    Checks that depend on the data are left out (see `sketch_model`).

    Raises:
        JobError: if the vectors cannot be read or do not fit.
    """
    if job.embeddings is None:
        return
    dimension_of(job.embeddings)
    model = sketch_model(job)
    if model is not None:
        require_fitting(model, job.embeddings, 0)


def _seed(seed: int) -> None:
    """Seed every generator whose state is saved in checkpoints."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _require_kernels(model: nn.Module, precision: str, device: str) -> None:
    if device == "cpu" and precision == "fp16" and any(isinstance(module, nn.RNNBase) for module in model.modules()):
        raise JobError(
            f"precision: {precision}: torch has no float16 kernels of recurrent layers on CPUs; use bf16 or fp32"
        )


def _require_apart(job: Job, model: nn.Module) -> None:
    """Raise an error if the job packs several texts into a row and this model lets the texts affect each other."""
    fault = packing_fault(model) if job.data.pack else None
    if fault is not None:
        raise JobError(f"data.pack: {fault}: leave data.pack out, or take another model")


def require_memory(job: Job, prepared: Prepared, baseline_bytes: Callable[[], int], budget_bytes: int) -> None:
    """Check, on the meta device, that the budget can hold the memory of a training run without activations.

    Args:
        job: the job.
        prepared: the prepared data of the job, for the sizes of the vocabulary and the labels.
        baseline_bytes: returns the bytes that the process uses without a model; called after a model was built on the
            meta device.
        budget_bytes: the budget of the device, in bytes.

    Raises:
        BudgetError: if the budget is too small; the message contains the bytes that are needed.
    """
    model = build_model(job, prepared.vocab_size, prepared.num_labels, prepared.end_id, prepared.pad_id, device="meta")
    resident = resident_bytes(model, job.optimizer)
    parts = {"process and libraries": baseline_bytes()} | {
        name.replace("_", " "): size or 0 for name, size in resident.items()
    }
    if job.distill is not None and job.distill.form == "memory" and not job.distill.cache:
        parts["the teacher"] = open_checkpoint(job.distill.teacher).num_bytes
    need_bytes = sum(parts.values())
    if need_bytes > budget_bytes:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        raise BudgetError(
            f"a budget of {format_bytes(budget_bytes)} cannot hold this training: before the first activation "
            f"{format_bytes(need_bytes)} are needed ({listed}); give a budget well above that, or a smaller model"
        )


def fingerprint(job: Job, prepared: Prepared) -> dict[str, str]:
    """Return the values that must match between a checkpoint and a job that resumes it.

    They are everything that affects the learned weights. The budget, the checkpoint interval and, unless the learning
    rate depends on it, the number of steps may differ. Each field has its own entry, so that a message can name the
    field that differs.
    """
    facts = job.model_dump(
        mode="json",
        exclude={*_NOT_LEARNED, "data", "tokenizer", "embeddings", "distill"},
    )
    facts["data"] = job.data.model_dump(mode="json", exclude=_SAID_BY_THE_KEY)
    if job.data.reset is None:  # older checkpoints without this field stay valid
        del facts["data"]["reset"]
    if job.quantization_aware is None:
        del facts["quantization_aware"]
    if job.embeddings is not None:  # the content of the vectors, not their path
        facts["embeddings"] = {"vectors": prepared.vectors_digest, "trainable": job.embeddings.trainable}
    if job.distill is not None:  # the teacher's content, not its path, and its number format
        facts["distill"] = job.distill.model_dump(mode="json", exclude={"form"}) | {
            "teacher": digest_of(Path(job.distill.teacher)),
            "codes": job.distill.form if job.distill.form == "int8" else "none",
        }
    if job.data.augment and job.data.augment.synonyms:  # the content of the table, not its path
        table = Path(job.data.augment.synonyms)
        content = table.read_bytes() if table.is_file() else b""
        facts["data"]["augment"]["synonyms"] = f"sha256:{hashlib.sha256(content).hexdigest()[:12]}"
    if job.optimizer.schedule != "constant":
        facts["steps"] = job.steps
    return dict(_entries(facts)) | {"data": prepared.key}


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value, as text, of every field of a nested object. Long values are hashed."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _entries(item, f"{name}.{inner}" if name else str(inner))
        return
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    is_long = len(text) > _LONGEST_ENTRY
    yield name, f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:12]}" if is_long else text
