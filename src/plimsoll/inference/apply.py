"""Inference over every row of a file, inside a budget: results are in the order of the rows, each written once.

Rows are read in blocks, tokenized, computed in passes of texts of similar length (`plimsoll.inference.passes`),
restored to their order and written (`plimsoll.inference.output`). Memory does not grow with the file. Block boundaries
depend on the rows only, so a resumed command runs the same passes as an uninterrupted one. The result of a row that
cannot be used is the reason, in the field ``error``.

Not handled: several processes or devices, rows appended during the run, and output formats other than JSON lines.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from plimsoll.data.formats import Reading
from plimsoll.data.input_rows import InputRow, InputRows, open_rows
from plimsoll.data.tokens.model_tokenizer import ModelTokenizer, Tokens
from plimsoll.device.base import Backend, backend_for
from plimsoll.device.cpu import onednn
from plimsoll.errors import DataError, InputError, Interrupted, PlimsollError
from plimsoll.files.store import Progress, silent
from plimsoll.inference.model import (
    DTYPES,
    ModelFolder,
    identity_of_model,
    import_first,
    load_for_inference,
    model_folder,
    tokenizer_of,
)
from plimsoll.inference.output import PartFile, check_output, part_file
from plimsoll.inference.passes import Batch, Passes, computed_to_the_end
from plimsoll.inference.placement import placed_model
from plimsoll.inference.subprocess_plan import length_to_plan, plan_apart
from plimsoll.models.hugging_face import MODEL_FAULTS
from plimsoll.models.inference import InferenceTask, default_task, inference_task, read_config
from plimsoll.models.names import RECURRENT
from plimsoll.models.quantized import Quantize
from plimsoll.processes.signals import StopRequest, stop_on_signal
from plimsoll.records.apply import ApplyFacts, Dtype
from plimsoll.records.placement import InferencePlan
from plimsoll.step.oom_boundary import fitting

if TYPE_CHECKING:
    from plimsoll.models.generation import Generation

_TOKENS_PER_PASS = {"cpu": 4 << 10, "cuda": 32 << 10}
"""Tokens per pass without a plan. Not tuned: enough to saturate a small model on a CPU; a GPU needs more."""

_ROWS_PER_PASS = 256
_BLOCK_ROWS = 4096
_BLOCK_BYTES_PER_TOKEN = 128
"""Characters of text in a block of rows, for each token of a pass. A block then takes about 32 passes, and only the
last few are not full."""

_FAULTS_KEPT = 5

RESULT_FIELDS = frozenset({
    "row", "error", "label", "labels", "score", "probabilities", "value", "values", "embedding", "log_probability",
    "num_predicted_tokens", "perplexity", "generated_text", "num_generated_tokens", "finish_reason",
})  # fmt: skip
"""Names of result fields. Columns with these names cannot be copied to the results."""


class RowProgress(Protocol):
    """A progress callback.

    It gets the bytes of the input file read so far, the size of this file, and the rows and tokens computed by this
    process.
    """

    def __call__(self, done_bytes: int, total_bytes: int, num_rows: int, num_tokens: int) -> None:
        """Show the progress."""
        ...


@dataclass(frozen=True)
class ApplyOptions:
    """Options for applying a model.

    Attributes:
        task: a task of `plimsoll.models.inference.INFERENCE_TASKS`; ``None``: the task that the model was trained for.
        columns: columns with the text, joined by newlines; ``None``: ``text``, or the only column of strings.
        keep: columns to copy to the results.
        longest_tokens: texts are truncated to this number of tokens; ``None``: to the model's maximum, or to the
            length with which its job trained it if that is shorter.
        rows_per_pass: maximum texts per pass; ``None``: at most 256, and fewer if they are long.
        dtype: data type of the weights.
        quantize: the integers to which linear layers are quantized, 8-bit or 4-bit; ``None``: not quantized. A
            quantized model is not planned: inside a budget, passes start with the default size.
        device: the device that computes.
        adapters: folders of LoRA adapters to merge into the weights; a model with adapters is not planned either.
        limit_bytes: the budget in bytes; ``None``: no limit.
        has_header: whether the first row of a csv file has column names; ``None``: see `plimsoll.data.formats.Reading`.
        is_strict: whether the first unusable row raises an error; otherwise the result of such a row is the reason.
        generation: options for the task ``generate``; ``None`` for other tasks.
    """

    task: str | None = None
    columns: tuple[str, ...] | None = None
    keep: tuple[str, ...] = ()
    longest_tokens: int | None = None
    rows_per_pass: int | None = None
    dtype: Dtype = "stored"
    quantize: Quantize | None = None
    device: str = "cpu"
    adapters: tuple[Path, ...] = ()
    limit_bytes: int | None = None
    is_strict: bool = False
    has_header: bool | None = None
    generation: Generation | None = None


def apply_model(
    model: Path,
    data: Path,
    out: Path,
    options: ApplyOptions | None = None,
    *,
    force: bool = False,
    progress: RowProgress = lambda done_bytes, total_bytes, num_rows, num_tokens: None,
    loading: Progress = silent,
) -> ApplyFacts:
    """Apply a model to the rows of a file, and resume if the same command was interrupted.

    Args:
        model: a Hugging Face folder, the folder of a recurrent model, or a run directory of ``plimsoll train``.
        data: the file with the rows: jsonl, csv, parquet, arrow or text, also compressed.
        out: the file for the results: one JSON object per row, in the order of the rows.
        options: options for applying the model.
        force: start over, and overwrite ``out``.
        progress: called after each pass.
        loading: called with the bytes of weights loaded so far.

    Returns:
        facts about the results, including rows written before an interruption.

    Raises:
        InputError: if an argument cannot be used; the message has the reason and a remedy.
        OutOfMemoryError: if not even a single text fits; completed results are kept.
        Interrupted: after SIGINT or SIGTERM; completed results are kept.
    """
    options = options or ApplyOptions()
    backend = backend_for(options.device)
    folder = model_folder(model)
    task = inference_task(options.task or default_task(folder.path), folder.path)
    _check(options, task)
    check_output(out, force, (data,), (folder.path, *options.adapters))
    rows = open_rows(data, Reading(text=options.columns, header=options.has_header), options.keep)
    tokenizer = tokenizer_of(folder, options.longest_tokens, _new_tokens(options))
    tokenizer.read(["This starts the tokenizer's threads before the limit is set.", "After that they might not start."])
    plan = _planned(folder, rows, task, tokenizer, options)
    import_first(folder.path, task.head)
    limit = nullcontext() if options.limit_bytes is None else backend.limited(options.limit_bytes)
    with part_file(out, _made_from(folder, rows, task, tokenizer, options), force) as part, stop_on_signal() as stop:
        first_row = part.num_rows
        applying = _Applying(folder, rows, task, tokenizer, options, plan, backend, stop, progress, loading)
        facts = applying.run(part, limit)
        part.finish()
    return ApplyFacts(model=str(model), data=str(data), output=str(out), first_row=first_row, **facts)


class _Read(NamedTuple):
    """A row with the token ids of its text; they are empty if the row cannot be used."""

    row: InputRow
    ids: list[int]
    is_truncated: bool


class _Applying:
    """One run of `apply_model` over the remaining rows."""

    def __init__(  # noqa: PLR0917 -- one call
        self,
        folder: ModelFolder,
        rows: InputRows,
        task: InferenceTask,
        tokenizer: ModelTokenizer,
        options: ApplyOptions,
        plan: InferencePlan | None,
        backend: Backend,
        stop: StopRequest,
        progress: RowProgress,
        loading: Progress,
    ) -> None:
        self._loading = loading
        self._folder, self._rows, self._task, self._tokenizer = folder, rows, task, tokenizer
        self._plan, self._options, self._backend, self._stop, self._progress = plan, options, backend, stop, progress
        self._done_bytes, self._num_rows, self._faults = 0, 0, list[str]()
        self._tokens_per_pass, self._rows_per_pass = _sizes(options, tokenizer, plan)

    def run(self, part: PartFile, limit: AbstractContextManager[None]) -> dict[str, Any]:
        """Compute and write all remaining rows; return the fields of `ApplyFacts`."""
        began = time.monotonic()
        self._backend.reset_peak()
        with limit, torch.inference_mode(), ExitStack() as placed:
            loaded = fitting(lambda: self._load(placed), self._backend, "loading the model")
            load_seconds, began = time.monotonic() - began, time.monotonic()
            passes = self._passes(loaded)
            for block in self._blocks(part.num_rows):
                self._compute(block, passes, part)
            peak_bytes = self._backend.use().peak_bytes
        return self._facts(part, passes, loaded, peak_bytes) | {
            "load_seconds": load_seconds,
            "seconds": time.monotonic() - began,
        }

    def _load(self, placed: ExitStack) -> nn.Module:
        options = self._options
        if self._plan is not None:
            return placed.enter_context(placed_model(self._folder.path, self._plan, self._loading, options.device))
        model = load_for_inference(
            self._folder.path,
            self._task.head,
            DTYPES[options.dtype],
            options.device,
            options.quantize,
            options.adapters,
            self._loading,
        )
        onednn.prepare_for(model)
        return model

    def _passes(self, model: nn.Module) -> Passes[dict[str, Any]]:
        generation = self._options.generation
        padding_id = self._padding_id(model)
        config: Any = model.config
        self._vocab_size = int((config.get_text_config() if hasattr(config, "get_text_config") else config).vocab_size)
        work = self._generating(model, padding_id) if generation is not None else self._computing(model)
        return Passes(
            work,
            self._backend,
            torch.device(self._options.device),
            padding_id,
            self._tokens_per_pass,
            self._rows_per_pass,
            more_tokens=0 if generation is None else generation.max_new_tokens,
            side="right" if generation is None else "left",
        )

    def _padding_id(self, model: nn.Module) -> int:
        """Return the padding token id of the model, or else of the tokenizer; 0 if neither has a padding token."""
        own = getattr(model.config, "pad_token_id", None)
        return int(own if own is not None else self._tokenizer.padding_id or 0)

    def _computing(self, model: nn.Module) -> Callable[[Batch, Sequence[int]], list[dict[str, Any]]]:
        finds_end = self._task.head == "classification" and _has_no_padding_id(model)

        def work(batch: Batch, _: Sequence[int]) -> list[dict[str, Any]]:
            found = (
                computed_to_the_end(self._task, model, batch, self._vocab_size)
                if finds_end
                else self._task.compute(model, batch)
            )
            return self._task.fields(tuple(part.cpu() for part in found))

        return work

    def _generating(self, model: Any, padding_id: int) -> Callable[[Batch, Sequence[int]], list[dict[str, Any]]]:
        from plimsoll.models.generation import generate

        generation = self._options.generation
        assert generation is not None

        def work(batch: Batch, places: Sequence[int]) -> list[dict[str, Any]]:
            rows = [self._numbers[place] for place in places]
            return [
                {
                    "generated_text": self._tokenizer.text_of(found.ids),
                    "num_generated_tokens": len(found.ids),
                    "finish_reason": "stop" if found.stopped else "length",
                }
                for found in generate(model, batch, rows, generation, padding_id)
            ]

        return work

    def _blocks(self, first: int) -> Iterator[list[InputRow]]:
        """Yield the rows from index ``first`` on in blocks, limited by the number of rows and the length of texts."""
        most_bytes = _BLOCK_BYTES_PER_TOKEN * self._tokens_per_pass
        block: list[InputRow] = []
        num_bytes = 0
        for row in self._rows.rows(first, self._tell):
            block.append(row)
            num_bytes += len(row.text)
            if len(block) >= _BLOCK_ROWS or num_bytes >= most_bytes:
                yield block
                block, num_bytes = [], 0
        if block:
            yield block

    def _tell(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes

    def _compute(self, block: list[InputRow], passes: Passes[dict[str, Any]], part: PartFile) -> None:
        """Compute the results of a block of rows, and append them to the part file."""
        tokens = iter(self._tokenizer.read([row.text for row in block if row.fault is None]))
        read = [_read(row, next(tokens) if row.fault is None else None, self._vocab_size) for row in block]
        usable = [one for one in read if one.row.fault is None]
        self._numbers = [one.row.number for one in usable]
        found = iter(self._found(usable, passes, part))
        results = [next(found) if one.row.fault is None else {"error": one.row.fault} for one in read]
        faults = [_fault(one.row, result) for one, result in zip(read, results, strict=True) if "error" in result]
        if faults and self._options.is_strict:
            raise DataError(f"{faults[0]}: correct it in {self._rows.file.path}, or leave out --strict")
        self._faults += faults[: _FAULTS_KEPT - len(self._faults)]
        lines = b"".join(_line(one.row, result) for one, result in zip(read, results, strict=True))
        counts = {
            "tokens": sum(len(one.ids) for one in read),
            "truncated": sum(one.is_truncated for one in read),
            "faults": len(faults),
        }
        part.append(lines, len(block), counts)
        self._num_rows += len(block)
        self._show(passes)

    def _found(self, usable: list[_Read], passes: Passes[dict[str, Any]], part: PartFile) -> list[dict[str, Any]]:
        try:
            return passes.run([one.ids for one in usable], lambda: self._between(part, passes))
        except PlimsollError:
            raise
        except MODEL_FAULTS as error:
            first, last = usable[0].row.number, usable[-1].row.number
            raise InputError(
                f"{self._folder.path} fails to {self._task.name} texts of rows {first} to {last} "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): try it with a smaller --max-length, "
                "or check the model and its configuration; then run the same command again to resume"
            ) from error

    def _between(self, part: PartFile, passes: Passes[dict[str, Any]]) -> None:
        self._show(passes)
        if self._stop.signal_number is not None:
            raise Interrupted(
                f"stopped with {part.num_rows:,} rows written: run the same command again to resume",
                self._stop.signal_number,
            )

    def _show(self, passes: Passes[dict[str, Any]]) -> None:
        self._progress(self._done_bytes, self._rows.file.num_bytes, self._num_rows, passes.counts.num_tokens)

    def _facts(
        self, part: PartFile, passes: Passes[dict[str, Any]], model: nn.Module, peak_bytes: int | None
    ) -> dict[str, Any]:
        counts, options = part.counts, self._options
        return {
            "task": self._task.name,
            "device": options.device,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "budget_bytes": options.limit_bytes,
            "longest_tokens": self._tokenizer.longest_tokens,
            "tokens_per_pass": self._tokens_per_pass,
            "rows_per_pass": self._rows_per_pass,
            "block_rows": _BLOCK_ROWS,
            "num_rows": part.num_rows,
            "num_faults": counts["faults"],
            "num_truncated": counts["truncated"],
            "num_tokens": counts["tokens"],
            "num_new_rows": self._num_rows,
            "num_new_tokens": passes.counts.num_tokens,
            "num_passes": passes.counts.num_passes,
            "num_padded_tokens": passes.counts.num_padded_tokens,
            "faults": tuple(self._faults),
            "oom_events": tuple(passes.counts.oom_events),
            "peak_bytes": peak_bytes,
        }


def _check(options: ApplyOptions, task: InferenceTask) -> None:
    """Raise an error if options contradict each other, the task, or the names of result fields."""
    if (task.name == "generate") != (options.generation is not None):
        what = "needs --max-new-tokens" if task.name == "generate" else "generates nothing"
        raise InputError(f"--task {task.name} {what}: give --task generate with --max-new-tokens, or neither")
    for name in options.keep:
        if name in RESULT_FIELDS:
            raise InputError(f"--keep {name}: results have a field of this name: rename the column in the data")
    for option, value in (("--max-length", options.longest_tokens), ("--batch-size", options.rows_per_pass)):
        if value is not None and value < 1:
            raise InputError(f"{option} {value} leaves nothing to compute: give 1 or more")
    if options.generation is not None and options.generation.cache == "offloaded" and options.device == "cpu":
        raise InputError(
            f"--cache {options.generation.cache} moves keys and values from a GPU to the host, and --device "
            f"{options.device} has them there already: leave it out, or give --device cuda"
        )


def _new_tokens(options: ApplyOptions) -> int:
    return 0 if options.generation is None else options.generation.max_new_tokens


def _has_no_padding_id(model: Any) -> bool:
    return hasattr(model.config, "get_text_config") and model.config.pad_token_id is None


def _planned(
    folder: ModelFolder, rows: InputRows, task: InferenceTask, tokenizer: ModelTokenizer, options: ApplyOptions
) -> InferencePlan | None:
    """Plan inference for texts as long as the longest text in the first rows.

    Return ``None`` without a budget, and for recurrent models, quantized models and models with adapters.
    """
    is_recurrent = read_config(folder.path).get("architecture") in RECURRENT
    if options.limit_bytes is None or options.quantize is not None or options.adapters or is_recurrent:
        return None
    texts = [row.text for row in islice(rows.rows(), _ROWS_PER_PASS) if row.fault is None]
    longest_tokens = max((len(tokens.ids) for tokens in tokenizer.read(texts)), default=1)
    return plan_apart(
        folder.path,
        task.name,
        length_to_plan(longest_tokens, tokenizer.longest_tokens),
        _new_tokens(options),
        options.limit_bytes,
        options.device,
        options.dtype,
    )


def _sizes(options: ApplyOptions, tokenizer: ModelTokenizer, plan: InferencePlan | None) -> tuple[int, int]:
    """Return the maximum number of tokens in a pass, including padding, and the maximum number of rows."""
    if plan is not None:
        tokens_per_pass = plan.micro_batch * (plan.longest_tokens + plan.new_tokens)
        return tokens_per_pass, min(options.rows_per_pass or _ROWS_PER_PASS, _ROWS_PER_PASS)
    tokens_per_pass = _TOKENS_PER_PASS[options.device.partition(":")[0]]
    if options.rows_per_pass is None:
        return tokens_per_pass, _ROWS_PER_PASS
    longest = (tokenizer.longest_tokens or tokens_per_pass) + _new_tokens(options)
    return max(options.rows_per_pass * longest, 1), options.rows_per_pass


def _made_from(
    folder: ModelFolder, rows: InputRows, task: InferenceTask, tokenizer: ModelTokenizer, options: ApplyOptions
) -> dict[str, Any]:
    """Return the settings that determine the results: their names, as messages show them, and JSON values."""
    return {
        "model": identity_of_model(folder.path),
        "data": rows.identity,
        "task": task.name,
        "--max-length": tokenizer.longest_tokens,
        "--dtype": options.dtype,
        "--quantize": options.quantize,
        "--adapter": [identity_of_model(folder) for folder in options.adapters],
        # The option `cache`, where keys and values are kept, does not change results.
        "generation": None if options.generation is None else asdict(replace(options.generation, cache="full")),
    }


def _read(row: InputRow, tokens: Tokens | None, vocab_size: int) -> _Read:
    """Combine a row and its tokens; if the tokens cannot be used, set the row's ``fault`` to the reason."""
    if tokens is None:
        return _Read(row, [], is_truncated=False)
    if not tokens.ids:
        return _Read(row._replace(fault="the tokenizer returns no tokens for the text"), [], is_truncated=False)
    if max(tokens.ids) >= vocab_size:
        why = f"its token {max(tokens.ids)} is outside the model's vocabulary of {vocab_size} tokens"
        return _Read(row._replace(fault=f"{why}: use the tokenizer it was trained with"), [], is_truncated=False)
    return _Read(row, tokens.ids, tokens.is_truncated)


def _fault(row: InputRow, result: dict[str, Any]) -> str:
    return f"row {row.number}: {result['error']}"


def _line(row: InputRow, result: dict[str, Any]) -> bytes:
    entry = {"row": row.number, **row.kept, **result}
    try:
        text = json.dumps(entry, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # NaN in a copied column, which JSON cannot represent
        text = json.dumps(_without_nan(entry), ensure_ascii=False, default=str)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in a copied column
        return json.dumps(json.loads(text)).encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
