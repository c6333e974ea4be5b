"""How large the batches of a job become: what a plan is made for, as it is known once the texts are prepared."""

from __future__ import annotations

from plimsoll.data.batches.batching import longest_sample
from plimsoll.data.prepare import Prepared, open_datasets
from plimsoll.data.samples.windows import Samples, Subset
from plimsoll.records.job import Job


def with_rows(prepared: Prepared, job: Job) -> Prepared:
    """Look how large the batches of a job become: the record with ``longest_row`` and ``held_out_batch``.

    Raises:
        DataError: if there are no datasets to make batches of (see `open_datasets`).
    """
    training, held_out = open_datasets(prepared, job)
    augment, length = job.data.augment, job.sequence_length
    changes_tokens = augment is not None and augment.token_function is not None
    # A user's function may make samples longer, and with batch_tokens shorter samples are more.
    longest = length if changes_tokens or job.batch_tokens else _longest_row(training, job)
    held_out_batch = None if held_out is None else (min(job.batch_size, len(held_out)), _longest_row(held_out, job))
    return prepared.model_copy(update={"longest_row": longest, "held_out_batch": held_out_batch})


def _longest_row(samples: Samples | Subset, job: Job) -> int:
    """Return how many tokens the longest row of a batch has; of texts that are tokenized as they are read, may have."""
    if job.data.on_the_fly or not (job.is_labelled or job.data.borders):
        return job.sequence_length
    return samples.padded_length(longest_sample(len(samples), samples.lengths)[1])
