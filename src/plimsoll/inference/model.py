"""The model for inference: its folder, weights, tokenizer and maximum length.

A run directory of `plimsoll train` stands for the model of the finished run. Names of models on the Hugging Face Hub
are not supported: nothing is downloaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from plimsoll.data.text.sources import SourceFile
from plimsoll.data.tokens.model_tokenizer import ModelTokenizer, load_model_tokenizer
from plimsoll.device.dtypes import NAMED
from plimsoll.errors import JobError
from plimsoll.files.identity import identity_of
from plimsoll.files.store import Progress, silent
from plimsoll.models.hugging_face import longest_text
from plimsoll.models.inference import read_config
from plimsoll.models.loading import Head, load_model, sketch_checkpoint
from plimsoll.models.names import RECURRENT
from plimsoll.models.quantized import Quantize
from plimsoll.models.recurrent.model import load_recurrent
from plimsoll.records.apply import Dtype
from plimsoll.records.job import Job
from plimsoll.weights.loading import open_checkpoint

DTYPES: Mapping[Dtype, torch.dtype | None] = {
    "stored": None,
    "fp32": NAMED["fp32"],
    "bf16": NAMED["bf16"],
    "fp16": NAMED["fp16"],
}

_MODEL_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_model.bin"),
    *("tokenizer*.json", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("*.model", "*.tiktoken", "tekken.json"),
    *("modules.json", "sentence_bert_config.json", "*_*/config.json"),  # sentence-transformers: 1_Pooling
)
"""Files that determine the results; notes and logs next to them may change."""

_NO_LIMIT_TOKENS = 1 << 24
"""A maximum length of at least this number of tokens means that the tokenizer has no maximum.

Such a tokenizer reports 10^30. Real maximum lengths are far below 16 million tokens.
"""


class ModelFolder(NamedTuple):
    """A folder with a model, and the job of the `plimsoll train` run that made it; ``None`` for other models."""

    path: Path
    job: Job | None


def model_folder(given: Path) -> ModelFolder:
    """Return the folder of a model: the given folder, or the model folder in a given run directory.

    Raises:
        JobError: if there is no such folder, or the run has no model yet.
    """
    if not given.is_dir():
        raise JobError(
            f"there is no model folder {given}: give a folder that `save_pretrained` wrote, or the run directory of "
            "`plimsoll train`"
        )
    run = given if (given / "job.yaml").is_file() else given.parent
    is_model = (given / "config.json").is_file()
    if (run / "job.yaml").is_file() and (run / ".plimsoll").exists() and (run == given or given.name == "model"):
        if not is_model and not (run / "model" / "config.json").is_file():
            raise JobError(f"the run {run} has no model yet: finish it, run `plimsoll train --resume --out {run}`")
        return ModelFolder(given if is_model else run / "model", Job.from_yaml(run / "job.yaml"))
    return ModelFolder(given, None)


def identity_of_model(folder: Path) -> dict[str, list[Any]]:
    """Return a fingerprint of a model: for each file that affects results, its size and a hash of sampled content."""
    found = {path for pattern in _MODEL_FILES for path in folder.glob(pattern) if path.is_file()}
    files = [SourceFile(str(path), path.stat().st_size, 0, True) for path in sorted(found)]
    return {
        str(Path(path).relative_to(folder)): [num_bytes, sample.hex()]
        for path, num_bytes, _, sample in identity_of(files)
    }


def load_for_inference(  # noqa: PLR0917 -- as `load_model` has them
    folder: Path,
    head: Head,
    dtype: torch.dtype | None,
    device: str,
    quantize: Quantize | None = None,
    adapters: Sequence[Path] = (),
    progress: Progress = silent,
) -> nn.Module:
    """Load a model in evaluation mode; the arguments are the same as in `load_model`.

    Raises:
        JobError: if the model lacks weights of the head, or is a recurrent model of unknown format.
        WeightsError: if the weights cannot be read.
    """
    config = read_config(folder)
    if config.get("architecture") in RECURRENT and quantize is None and not adapters:
        return load_recurrent(folder, dtype or stored_dtype(folder)).to(device).eval()
    loaded = load_model(
        folder, head=head, dtype=dtype, device=device, quantize=quantize, adapters=adapters, progress=progress
    )
    require_head(folder, head, loaded.missing)
    return loaded.model


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the floating-point data type with the most bytes of weights in a folder; float32 if there are no weights.

    Raises:
        WeightsError: if the weights cannot be read.
    """
    stored: Counter[torch.dtype] = Counter()
    for entry in open_checkpoint(folder).entries.values():
        if entry.dtype.is_floating_point:
            stored[entry.dtype] += entry.num_bytes
    return stored.most_common(1)[0][0] if stored else torch.float32


def import_first(folder: Path, head: Head) -> None:
    """Import the libraries that a model needs. Call it before memory is limited, so that their memory does not count.

    Raises:
        WeightsError: if the checkpoint cannot be read.
    """
    if read_config(folder).get("architecture") not in RECURRENT:
        sketch_checkpoint(folder, head=head)


def require_head(folder: Path, head: Head, missing: Sequence[str]) -> None:
    """Raise an error if results would depend on randomly initialized weights.

    Args:
        folder: the model's folder.
        head: the head that computes results; with ``"none"``, missing weights (a pooler's) are not used.
        missing: names of the weights that the checkpoint lacks; see `plimsoll.models.loading.Loaded`.

    Raises:
        JobError: if weights are missing and there is a head.
    """
    if head != "none" and missing:
        names = ", ".join(sorted(missing))
        raise JobError(f"model: {folder} lacks weights ({names}): give a model that was trained for it")


def tokenizer_of(folder: ModelFolder, longest_tokens: int | None, new_tokens: int = 0) -> ModelTokenizer:
    """Load the tokenizer of a model.

    Args:
        folder: the model's folder.
        longest_tokens: texts are truncated to this number of tokens; ``None``: to the model's maximum, or the length
            with which its job trained it if that is shorter.
        new_tokens: number of tokens to generate for each text, which need positions, too. If it is not 0, truncation
            removes the beginning of a text, not its end.

    Raises:
        DataError: if the folder has no tokenizer.
        JobError: if the model has fewer positions than ``longest_tokens`` plus ``new_tokens``.
    """
    tokenizer = load_model_tokenizer(folder.path)
    positions = _positions(folder.path)
    left = None if positions is None else _positions_left(folder.path, positions, longest_tokens, new_tokens)
    known = [tokenizer.model_max_length, _max_seq_length(folder.path), left]
    limits = [limit for limit in known if limit is not None and limit < _NO_LIMIT_TOKENS]
    if longest_tokens is None and folder.job is not None:
        limits.append(folder.job.sequence_length)
    longest = longest_tokens if longest_tokens is not None else min(limits, default=None)
    return ModelTokenizer(tokenizer, longest, with_special=_keeps_template(folder.job), keeps_end=new_tokens > 0)


def _keeps_template(job: Job | None) -> bool:
    """Return whether texts get the special tokens that the model's tokenizer adds.

    They do, except if the model is from a run whose job has no field ``special_tokens``: it was trained without them.
    ``None`` is the job of a model that is not from a run.
    """
    return job is None or "special_tokens" in job.tokenizer.model_fields_set


def _positions_left(folder: Path, positions: int, longest_tokens: int | None, new_tokens: int) -> int:
    """Return the number of positions that remain for a text if ``new_tokens`` are generated.

    Raises:
        JobError: if no position remains, or fewer than ``longest_tokens``.
    """
    left = positions - new_tokens
    if left < 1:
        raise JobError(
            f"--max-new-tokens {new_tokens} leaves no tokens for the prompt, because {folder} has {positions} "
            f"positions: give {positions - 1} or less"
        )
    if longest_tokens is not None and longest_tokens > left:
        more = f" with --max-new-tokens {new_tokens}" if new_tokens else ""
        raise JobError(
            f"--max-length {longest_tokens}{more} is more than the {positions} positions of {folder}: give "
            f"{left} or less"
        )
    return left


def _max_seq_length(folder: Path) -> int | None:
    """Return the number of tokens to which sentence-transformers truncates texts; ``None`` if it is not set."""
    try:
        settings = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = settings.get("max_seq_length") if isinstance(settings, dict) else None
    return found if isinstance(found, int) else None


def _positions(folder: Path) -> int | None:
    """Return the number of positions of a model; ``None`` for recurrent models, which have no maximum."""
    return None if read_config(folder).get("architecture") in RECURRENT else longest_text(folder)
