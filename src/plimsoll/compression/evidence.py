"""Evaluation data: batches for importance scores, and the quality of a model.

`JobEvidence` uses the data of a job. Quality is then the result that ``plimsoll train`` reports on the job's validation
data. `TextEvidence` uses plain texts, for embedding models. Quality is then the mean cosine between a text's vectors
from the model and from the original. If a method changed the tokenizer, the new tokenizer is applied to the same texts.

Does NOT carry a recurrent state between the windows of a text: each window starts with the initial state.

Shapes: N texts, B texts of a batch, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.compression.methods import Calibration
from plimsoll.data.batches.loader import Batch
from plimsoll.data.datasets import open_datasets
from plimsoll.data.formats import Reading
from plimsoll.data.input_rows import open_rows
from plimsoll.data.prepare import prepare
from plimsoll.data.tokens.model_tokenizer import ModelTokenizer, load_model_tokenizer
from plimsoll.device.base import backend_for
from plimsoll.errors import DataError, JobError
from plimsoll.inference.model import ModelFolder, tokenizer_of
from plimsoll.models.assemble import token_counts
from plimsoll.models.build import build_model, loss_of
from plimsoll.models.inference import Embed, InferenceTask, inference_task
from plimsoll.models.loading import Head, load_model
from plimsoll.models.workload import Workload
from plimsoll.records.job import Job, TokenizerSource
from plimsoll.records.prepared import Prepared
from plimsoll.records.shrink import Quality
from plimsoll.step.evaluate import Evaluator
from plimsoll.step.losses.additive import Additivity
from plimsoll.step.micro_batches import shape_of
from plimsoll.step.oom_boundary import Position
from plimsoll.training.accuracy import Accuracy
from plimsoll.training.tagging import TagScores

_TOKENS_PER_PASS = 1024  # few, so that weights dominate the measured peak, not activations
_CALIBRATION_PASSES = 64
_BLOCK_ROWS = 256
_SEQUENCE_TOKENS = 256  # limit for plain texts, if the model allows more


class Evidence(Protocol):
    """Data that models are evaluated on."""

    @property
    def head(self) -> Head:
        """The task head with which models are loaded."""
        ...

    def cannot_judge(self, method: str) -> str | None:
        """Return why models that a method made cannot be compared with the original; ``None`` if they can."""
        ...

    def load(self, folder: Path, tokenizer: Path | None) -> nn.Module:
        """Load a model for compression: dense, in float32, on the CPU, in evaluation mode.

        ``tokenizer`` is the folder of the model's tokenizer; ``None`` is the original's tokenizer.
        """
        ...

    def calibration(self, tokenizer: Path | None) -> Calibration:
        """Return the data that methods may read.

        Texts are tokenized by the tokenizer in the folder ``tokenizer``; ``None`` is the original's tokenizer.
        """
        ...

    def quality(self, model: nn.Module, tokenizer: Path | None) -> Quality:
        """Return the quality of a model on the evaluation data.

        ``tokenizer`` is the folder of the model's tokenizer; ``None`` is the original's tokenizer.
        """
        ...

    def inference(self, folder: Path) -> InferenceTask | None:
        """Return the inference task for the model in ``folder``; ``None`` if no inference task suits the model."""
        ...

    def batches(self, tokenizer: Path | None) -> Iterator[dict[str, Tensor]]:
        """Yield the evaluation batches without labels: ``input_ids`` and ``attention_mask``, both (B, T)."""
        ...


class _Data(NamedTuple):
    prepared: Prepared
    train: Any
    validation: Any


@dataclass
class JobEvidence:
    """Evaluation on the data of a job.

    Args:
        job: a job whose ``model`` is the folder of the original.
        cache: the cache folder for the tokenized data of the job.
        most_samples: the maximum number of validation texts to evaluate, or of windows for a language model; ``None``
            for all.
    """

    job: Job
    cache: Path
    most_samples: int | None = None
    _opened: dict[Path | None, _Data] = field(default_factory=dict)

    @property
    def head(self) -> Head:
        """The head with which models are loaded: the job's task."""
        return self.job.task

    @property
    def pass_samples(self) -> int:
        """The number of samples in an evaluation pass."""
        return max(1, _TOKENS_PER_PASS // self.job.sequence_length)

    def cannot_judge(self, method: str) -> str | None:
        """Return ``None``: every model of the task has a loss."""
        return None

    def job_for(self, folder: Path, tokenizer: Path | None) -> Job:
        """Return the job with the model in ``folder`` in place of the original.

        ``tokenizer`` is the folder of the model's tokenizer; ``None`` keeps the tokenizer of the job.
        """
        changes: dict[str, Any] = {"model": str(folder)}
        if tokenizer is not None:
            changes["tokenizer"] = TokenizerSource(path=str(tokenizer))
        return self.job.model_copy(update=changes)

    def load(self, folder: Path, tokenizer: Path | None) -> nn.Module:
        """See `Evidence.load`."""
        prepared = self._data(tokenizer).prepared
        # Weights from a quantization-aware training run are loaded unrounded. A method such as `int8` rounds them.
        job = self.job_for(folder, tokenizer).model_copy(update={"quantization_aware": None})
        return build_model(job, prepared.vocab_size, prepared.num_labels, prepared.end_id, prepared.pad_id).eval()

    def calibration(self, tokenizer: Path | None) -> Calibration:
        """See `Evidence.calibration`. Batches are drawn evenly from the training samples."""
        data = self._data(tokenizer)
        num_samples = min(len(data.train), _CALIBRATION_PASSES * self.pass_samples)
        ids = np.linspace(0, len(data.train) - 1, num_samples).astype(np.int64)

        def batches() -> Iterator[Mapping[str, Tensor]]:
            for begin in range(0, len(ids), self.pass_samples):
                yield data.train.batch(ids[begin : begin + self.pass_samples])

        return Calibration(batches, self._counts(data.prepared))

    def quality(self, model: nn.Module, tokenizer: Path | None) -> Quality:
        """See `Evidence.quality`: the loss and scores of ``plimsoll train`` on the validation data."""
        data = self._data(tokenizer)
        loss, units = loss_of(self.job.task)
        # A workload requires an optimizer; this one never steps.
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
        workload = Workload(model, optimizer, loss, units)
        position, windows = Position(), getattr(data.validation, "windows", None)
        backend = backend_for("cpu")
        additivity = Additivity(workload, backend, position, recut_loss=False, never_cut=False)
        evaluator = Evaluator(workload, backend, position, lambda batch: shape_of(batch, workload), 1, additivity)
        batches = ((batch.fields, batch.sample_ids) for batch in self._passes(data))
        if self.job.task == "language-modeling":
            found = evaluator.evaluate(fields for fields, _ in batches)
            return Quality(loss=found.loss, num_samples=found.num_samples)
        if self.job.task == "token-classification":
            with TagScores(model, position, data.prepared.label_names, windows) as scores:
                found = evaluator.evaluate(scores.counted(batches))
            accuracy, entity_f1 = scores.accuracy(), scores.entity_f1()
        else:
            with Accuracy(model, position, windows) as counted:
                found = evaluator.evaluate(counted.counted(batches))
            accuracy, entity_f1 = counted.share(), None
        num_texts = len(np.unique(self._texts_of(data, self._judged_ids(data))))
        return Quality(loss=found.loss, num_samples=num_texts, accuracy=accuracy, entity_f1=entity_f1)

    def inference(self, folder: Path) -> InferenceTask | None:
        """See `Evidence.inference`."""
        names = {"language-modeling": "score", "classification": "classify"}
        return inference_task(names[self.job.task], folder) if self.job.task in names else None

    def batches(self, tokenizer: Path | None) -> Iterator[dict[str, Tensor]]:
        """See `Evidence.batches`."""
        for batch in self._passes(self._data(tokenizer)):
            ids = batch.fields["input_ids"]
            yield {"input_ids": ids, "attention_mask": batch.fields.get("attention_mask", torch.ones_like(ids))}

    def _data(self, tokenizer: Path | None) -> _Data:
        if tokenizer not in self._opened:
            job = self.job_for(Path(str(self.job.model)), tokenizer)
            prepared = prepare(job, self.cache)
            train, validation = open_datasets(prepared, job)
            if validation is None or not len(validation):
                raise DataError(
                    f"data.validation is {self.job.data.validation}, so smaller models cannot be evaluated: set "
                    "data.validation to a file, or to a share of the training data such as 0.1"
                )
            self._opened[tokenizer] = _Data(prepared, train, validation)
        return self._opened[tokenizer]

    def _passes(self, data: _Data) -> Iterator[Batch]:
        ids = self._judged_ids(data)
        for begin in range(0, len(ids), self.pass_samples):
            chosen = ids[begin : begin + self.pass_samples]
            yield Batch(data.validation.batch(chosen), chosen, 0, begin)

    def _judged_ids(self, data: _Data) -> NDArray[np.int64]:
        """Return the ids of the samples to evaluate: all windows of each selected text, to score it as a whole."""
        ids = np.arange(len(data.validation))
        texts = self._texts_of(data, ids)
        whole = np.unique(texts)
        if self.most_samples is None or self.most_samples >= len(whole):
            return ids
        chosen = whole[np.linspace(0, len(whole) - 1, self.most_samples).astype(np.int64)]
        return ids[np.isin(texts, chosen)]

    def _texts_of(self, data: _Data, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the text index of each sample. For a language model, each sample counts as a text."""
        windows = getattr(data.validation, "windows", None)
        return ids if windows is None or self.job.task == "language-modeling" else windows.parents(ids)

    def _counts(self, prepared: Prepared) -> NDArray[np.int64] | None:
        parts = [part for part in (prepared.train, prepared.validation) if part is not None]
        folders = [Path(part.tokens_folder) for part in parts if part.tokens_folder is not None]
        if len(folders) < len(parts):  # tokenized on the fly: counts are unknown before reading
            return None
        total = np.zeros(prepared.vocab_size, np.int64)
        for folder in dict.fromkeys(folders):  # training and held-out texts may be in one folder
            total += token_counts(folder, prepared.vocab_size)
        return total


@dataclass
class TextEvidence:
    """Evaluation of an embedding model on plain texts. Tokens are counted in all texts, not only in evaluated ones.

    Args:
        model: the folder of the original.
        data: a file of rows, see `plimsoll.data.input_rows`.
        columns: the columns with the text; ``None``: see `plimsoll.data.formats.Reading`.
        has_header: whether the first row of a csv names its columns; ``None``: see `plimsoll.data.formats.Reading`.
        most_samples: the maximum number of rows to evaluate; ``None`` for all.
    """

    model: Path
    data: Path
    columns: tuple[str, ...] | None = None
    has_header: bool | None = None
    most_samples: int | None = None
    head: Head = "none"
    _vectors_ND: Tensor | None = None

    def cannot_judge(self, method: str) -> str | None:
        """Return a reason only for the method ``hidden``; ``None`` for other methods.

        Its models return shorter vectors, which have no cosine with the original's vectors.
        """
        if method != "hidden":
            return None
        return "vectors of another size cannot be compared with the original's, and there is no other quality measure"

    def load(self, folder: Path, tokenizer: Path | None) -> nn.Module:
        """See `Evidence.load`."""
        return load_model(folder, head="none", dtype=torch.float32).model

    def calibration(self, tokenizer: Path | None) -> Calibration:
        """See `Evidence.calibration`."""
        folder = tokenizer or self.model
        vocab_size = len(load_model_tokenizer(folder))
        counts = np.zeros(vocab_size, np.int64)
        for ids in self._tokens(folder, None):
            counts += np.bincount(ids, minlength=vocab_size)[:vocab_size]

        def batches() -> Iterator[Mapping[str, Tensor]]:
            for number, batch in enumerate(self.batches(tokenizer)):
                if number == _CALIBRATION_PASSES:
                    return
                yield batch

        return Calibration(batches, counts)

    def quality(self, model: nn.Module, tokenizer: Path | None) -> Quality:
        """See `Evidence.quality`.

        The quality is the mean cosine similarity to the original's vectors, and the loss is one minus this mean.
        """
        if self._vectors_ND is None:
            self._vectors_ND = self._embedded(self.load(self.model, None), None)
        vectors_ND = self._embedded(model, tokenizer)
        if vectors_ND.shape != self._vectors_ND.shape:
            raise JobError(
                f"the vectors have {vectors_ND.shape[1]} numbers and the original's {self._vectors_ND.shape[1]}, so "
                "they cannot be compared: leave out methods that change the hidden size"
            )
        similarity = torch.nn.functional.cosine_similarity(vectors_ND, self._vectors_ND, dim=1).mean().item()
        return Quality(loss=1 - similarity, num_samples=len(vectors_ND), similarity=similarity)

    def inference(self, folder: Path) -> InferenceTask | None:
        """See `Evidence.inference`."""
        return inference_task("embed", folder)

    def batches(self, tokenizer: Path | None) -> Iterator[dict[str, Tensor]]:
        """See `Evidence.batches`."""
        folder = tokenizer or self.model
        padding_id = load_model_tokenizer(folder).pad_token_id or 0
        rows: list[list[int]] = []
        for ids in self._tokens(folder, self.most_samples):
            rows.append(ids)
            if len(rows) * max(map(len, rows)) >= _TOKENS_PER_PASS:
                yield _padded(rows, padding_id)
                rows = []
        if rows:
            yield _padded(rows, padding_id)

    def _embedded(self, model: nn.Module, tokenizer: Path | None) -> Tensor:
        task = Embed() if (found := self.inference(self.model)) is None else found
        with torch.inference_mode():
            parts = [task.compute(model, batch)[0] for batch in self.batches(tokenizer)]
        if not parts:
            raise DataError(f"{self.data} has no row with text: give --data a file that has some")
        return torch.cat(parts)

    def _tokens(self, folder: Path, most_rows: int | None) -> Iterator[list[int]]:
        limit = tokenizer_of(ModelFolder(self.model, None), None).longest_tokens or _SEQUENCE_TOKENS
        tokenizer = ModelTokenizer(load_model_tokenizer(folder), min(limit, _SEQUENCE_TOKENS))
        rows = open_rows(self.data, Reading(text=self.columns, header=self.has_header), ()).rows()
        texts = (row.text for row in islice(rows, most_rows) if row.fault is None)
        while block := list(islice(texts, _BLOCK_ROWS)):
            yield from (tokens.ids for tokens in tokenizer.read(block) if tokens.ids)


def _padded(rows: Iterable[list[int]], padding_id: int) -> dict[str, Tensor]:
    tensors = [torch.tensor(ids) for ids in rows]
    ids_BT = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding_id)
    masks = [torch.ones_like(ids) for ids in tensors]
    return {"input_ids": ids_BT, "attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)}
