"""``plimsoll apply``: resumable inference with a model on every row of a file, inside a budget."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, NoHeader, Quiet, Restart, Timings

if TYPE_CHECKING:
    from plimsoll.models.generation import Cache
    from plimsoll.models.quantized import Quantize
    from plimsoll.records.apply import Dtype


_GENERATION = "Generation (with --task generate)"


# long: one line per option
def apply(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder or run directory.")],
    *,
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Input: jsonl, csv, tsv, parquet, arrow or text.", rich_help_panel=options.DATA
        ),
    ],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME",
            help="Text column; several are joined by newlines.",
            show_default="text, or the only text column",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="NAME",
            help="Input column to copy to the results; repeatable.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    no_header: NoHeader = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first row without a result.", rich_help_panel=options.DATA)
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK", help=options.TASK_HELP, show_default="the model's", rich_help_panel=options.INFERENCE
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Truncate longer texts to N tokens.",
            show_default="the model's limit",
            rich_help_panel=options.INFERENCE,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Most rows in a pass.", show_default="by tokens", rich_help_panel=options.INFERENCE
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help=options.DTYPE_HELP, rich_help_panel=options.INFERENCE)
    ] = "stored",
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Lossy: linear layers in int8 or int4.",
            rich_help_panel=options.INFERENCE,
        ),
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option(
            "--adapter", metavar="DIR", help="LoRA adapter to merge; repeatable.", rich_help_panel=options.INFERENCE
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help=options.NEW_TOKENS_HELP, rich_help_panel=_GENERATION)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Sample at this temperature, above 0.",
            show_default="greedy",
            rich_help_panel=_GENERATION,
        ),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Sample from the likeliest tokens, up to this total.", rich_help_panel=_GENERATION
        ),
    ] = 1.0,
    cache: Annotated[
        str,
        typer.Option(metavar="PLACE", help="Key-value cache: full or offloaded.", rich_help_panel=_GENERATION),
    ] = "full",
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed of the sampling.", rich_help_panel=_GENERATION)
    ] = 0,
    budget: Annotated[str | None, options.budget("none")] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:1.", rich_help_panel=options.MEMORY)
    ] = "cpu",
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Results, one JSON object per row.", rich_help_panel=options.OUTPUT
        ),
    ],
    force: Restart = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJson = False,
) -> None:
    """Run a model on every row of a file.

    The results are in the order of the rows. To continue after an
    interruption, run the same command again.

    \b
    Examples:
      plimsoll apply runs/a --data reviews.jsonl --out labels.jsonl
      plimsoll apply all-MiniLM-L6-v2 --data texts.csv --out vectors.jsonl
      plimsoll apply gpt2 --task score --data texts.jsonl --out scores.jsonl
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

        chosen = ApplyOptions(
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
                facts = apply_model(model, data, out, chosen, force=force, progress=progress, loading=loading)
        except KeyboardInterrupt:
            message = f"stopped: the rows written for {out} are kept; run the same command again to continue"
            raise Interrupted(message, signal.SIGINT) from None
    show_record(facts, as_json)
