"""``plimsoll apply``: a model applied to every row of a file, inside its budget, resumable."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from plimsoll.cli.options import AsJsonAlone, ForceAnew, Quiet, Timings

if TYPE_CHECKING:
    from plimsoll.models.generation import Cache
    from plimsoll.models.quantized import Quantize
    from plimsoll.records.apply import Dtype


# long: one call with one line for each option
def apply(  # noqa: PLR0917 -- typer calls it by name
    model: Annotated[Path, typer.Argument(help="A Hugging Face folder, or the run directory of a training.")],
    data: Annotated[Path, typer.Option(help="The rows: jsonl, csv, parquet, arrow, or text, a row a line.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The results, one JSON object a row, in the same order.")],
    task: Annotated[
        str | None, typer.Option(help="score, classify, embed or generate. Default: what the model was made for.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="The column with the text; several are joined by newlines.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option("--keep", help="A column to copy to the results, e.g. id.")] = None,
    budget: Annotated[str | None, typer.Option(help="Memory it may use, e.g. 2GiB. Default: what there is.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="The most rows of a pass. Default: as many as have some thousand tokens.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens that longer texts are truncated to. Default: what the model reads.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: stored, fp32, bf16 or fp16.")] = "stored",
    quantize: Annotated[
        str | None, typer.Option(help="Linear layers in integers: int8 or int4. Other results, in less memory.")
    ] = None,
    adapters: Annotated[
        list[Path] | None, typer.Option("--adapter", help="A LoRA adapter to merge into the weights; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    max_new_tokens: Annotated[int | None, typer.Option(help="With --task generate: the most tokens of each.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="With --task generate: draw tokens. Default: take the likeliest.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="With --temperature: of the likeliest tokens, this much together.")
    ] = 1.0,
    cache: Annotated[
        str, typer.Option(help="With --task generate: full, or offloaded to the host, on a GPU.")
    ] = "full",
    seed: Annotated[int, typer.Option(help="With --temperature: other numbers give other texts.")] = 0,
    no_header: Annotated[
        bool, typer.Option("--no-header", help="The first row of the csv is a row; its columns are 1, 2, ...")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")] = False,
    force: ForceAnew = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJsonAlone = False,
) -> None:
    """Apply a model to every row of a file; when it was stopped, the same command goes on.

    \b
    Examples:
      plimsoll apply runs/a --data reviews.jsonl --out labels.jsonl --budget 2GiB
      plimsoll apply all-MiniLM-L6-v2 --data texts.csv --column body --keep id --out vectors.jsonl
      plimsoll apply gpt2 --task score --data texts.jsonl --out scores.jsonl --batch-size 8
      plimsoll apply gpt2 --task generate --max-new-tokens 40 --data prompts.txt --out texts.jsonl
    """
    from plimsoll.cli.answer import limit_bytes_of, show_record
    from plimsoll.cli.output import failures_shown
    from plimsoll.errors import Interrupted
    from plimsoll.inference.options import generation_of, require_known
    from plimsoll.report.progress import row_rates, spinner

    with failures_shown() if as_json else nullcontext():
        limit_bytes = limit_bytes_of(budget)
        require_known(out, dtype, quantize, cache)
        generation = generation_of(max_new_tokens, temperature, top_p, seed, cast("Cache", cache))
        with spinner(quiet or as_json):
            from plimsoll.inference.apply import ApplyOptions, apply_model

        options = ApplyOptions(
            task=task,
            columns=tuple(columns) if columns else None,
            keep=tuple(keep or ()),
            longest_tokens=max_length,
            rows_per_pass=batch_size,
            dtype=cast("Dtype", dtype),
            quantize=cast("Quantize | None", quantize),
            device=device,
            adapters=tuple(adapters or ()),
            limit_bytes=limit_bytes,
            is_strict=strict,
            has_header=False if no_header else None,
            generation=generation,
        )
        try:
            with row_rates(data.name, quiet or as_json) as (progress, loading):
                facts = apply_model(model, data, out, options, force=force, progress=progress, loading=loading)
        except KeyboardInterrupt:
            message = f"stopped: what was written for {out} is kept; give the same command again to go on"
            raise Interrupted(message, signal.SIGINT) from None
    show_record(facts, as_json)
