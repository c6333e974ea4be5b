"""The teacher cache: one pass of the teacher over the training samples saves its most likely tokens.

After this pass the teacher is not needed. It runs in float32, without gradients and in batches as large as fit: a batch
that runs out of memory is repeated in halves. The logits of a language model are computed for a few positions at a
time, because they need much memory. Results are written to disk every 4,096 samples, and an interrupted pass is resumed
from there. The cached probabilities are normalized over the whole vocabulary at the temperature of the job. The cached
tokens alone do not determine the normalization at another temperature, which therefore needs another pass.

Does NOT handle samples that change between epochs: a job with such samples and a teacher cache is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plimsoll.data.batch import move_batch
from plimsoll.data.datasets import open_datasets
from plimsoll.data.samples.teacher_cache import TeacherCacheFiles, ends_of
from plimsoll.device.base import Backend
from plimsoll.errors import OutOfMemoryError
from plimsoll.files.store import Facts, Progress, silent, stored
from plimsoll.models.assemble import teacher_cache_folder
from plimsoll.models.distillation.chunked import CHUNK_NUMBERS, softened
from plimsoll.models.head_apart import head_apart
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared
from plimsoll.records.run import OomEvent
from plimsoll.step.failpoints import failpoint
from plimsoll.step.oom_boundary import Position, attempt

_SAMPLES_KEPT_AT_ONCE = 4096
_STAGE = "caching the teacher's predictions"


def prepare_teacher_cache(
    job: Job, prepared: Prepared, load: Callable[[], nn.Module], backend: Backend, progress: Progress = silent
) -> None:
    """Fill the teacher cache of a job, unless it is complete or the job has no teacher cache.

    Args:
        job: the job.
        prepared: the prepared data of the job.
        load: a function that loads the teacher; called only if the teacher is needed.
        backend: backend of the device that the teacher runs on.
        progress: a function that is called with the number of completed samples.

    Raises:
        OutOfMemoryError: if not even one sample fits.
        OutputError: if the cache cannot be written.
    """
    if job.distill is None or job.distill.cache is None:
        return
    num_words = None if job.is_labelled else prepared.vocab_size
    num_kept = prepared.num_labels if job.is_labelled else min(job.distill.cache, prepared.vocab_size)
    assert num_kept is not None

    def write(folder: Path) -> Facts:
        samples, _ = open_datasets(prepared, job)
        ends = ends_of(samples, is_by_token=job.task != "classification")
        with TeacherCacheFiles(folder, ends, num_kept, num_words) as files:
            if files.num_done < len(samples):
                _Pass(job, load(), backend, num_kept, num_words).run(samples, files, progress)
            return files.facts()

    stored(teacher_cache_folder(job, prepared), write, goes_on=True)
    backend.release()  # free all memory of the teacher before the training
    backend.reset_peak()


class _Pass:
    """The pass of the teacher over the samples, in batches of the largest size that fits."""

    def __init__(self, job: Job, teacher: nn.Module, backend: Backend, num_kept: int, num_words: int | None) -> None:
        assert job.distill is not None
        self._teacher, self._backend, self._num_kept, self._num_words = teacher, backend, num_kept, num_words
        self._temperature, self._batch_size = job.distill.temperature, job.batch_size
        self._device = next(teacher.parameters()).device

    def run(self, samples: Any, files: TeacherCacheFiles, progress: Progress) -> None:
        """Compute and write the predictions for all remaining samples."""
        num_kept = files.num_done
        while files.num_done < len(samples):
            ids = np.arange(files.num_done, min(files.num_done + self._batch_size, len(samples)))
            said = attempt(partial(self._said, samples, ids), self._backend, Position(phase="evaluation"))
            if isinstance(said, OomEvent):
                self._give_way(said, len(ids))
                continue
            files.write(*said)
            if files.num_done - num_kept >= _SAMPLES_KEPT_AT_ONCE:
                files.keep()
                num_kept = files.num_done
            progress(_STAGE, files.num_done, len(samples))

    def _give_way(self, event: OomEvent, num_samples: int) -> None:
        if num_samples == 1:
            raise OutOfMemoryError(
                f"memory ran out while the teacher predicted 1 sample ({event.shortage}): give a larger budget, "
                "shorter samples, or a smaller teacher"
            )
        self._backend.release()
        self._batch_size = -(-num_samples // 2)

    @torch.no_grad()
    def _said(self, samples: Any, ids: NDArray[np.int64]) -> tuple[Tensor | None, Tensor]:
        failpoint("evaluation")
        fields = move_batch(samples.batch(ids), self._device)
        labels = fields.pop("labels")
        if self._num_words is None:
            logits = self._teacher(**fields).logits.float()
            log_p = softened(logits, self._temperature).cpu()
            return None, log_p[:, None] if labels.dim() == 1 else log_p
        return self._likeliest(fields)

    def _likeliest(self, fields: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        parts, _ = head_apart(self._teacher, fields)
        num_samples, length = fields["input_ids"].shape
        chunk = max(1, CHUNK_NUMBERS // (num_samples * parts.num_outputs))
        words = torch.empty((num_samples, length, self._num_kept), dtype=torch.int32)
        log_p = torch.empty(words.shape, dtype=torch.float32)
        for begin in range(0, length, chunk):
            logits = parts.head(parts.hidden_BTH[:, begin : begin + chunk]).float()
            top = softened(logits[..., : self._num_words], self._temperature).topk(self._num_kept, dim=-1)
            del logits
            log_p[:, begin : begin + chunk], words[:, begin : begin + chunk] = top.values.cpu(), top.indices.cpu()
        return words, log_p
