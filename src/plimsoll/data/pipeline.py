"""The stages that the texts of a job pass through, from files to samples, and the `Pipeline` that runs them.

A stage declares its inputs and its output: a `Store` in the cache, or a value if there is nothing to cache. The
function of the stage defines the operation on the texts. Only `Pipeline.run` decides the order of stages, and whether
an output is made or taken from the cache.

torch is imported only to pack texts into rows. Not handled: the use of samples (`plimsoll.data.datasets`), and data
made for a model. Such data are word vectors (`plimsoll.models.assemble.prepare_vectors`) and the teacher cache
(`plimsoll.training.teacher_cache`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from plimsoll.data.formats import Reading
from plimsoll.data.samples.labels import labels_of, names_to_number_by
from plimsoll.data.samples.tags import tags_of
from plimsoll.data.samples.text_windows import Spans, cut_texts, select_spans
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.held_out import Side, choose_texts, num_repeated, refuse_same_files, sides
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.store import Tokens, TokenStore, tokenize
from plimsoll.data.tokens.tokenizer import Tokenizer, prepare_tokenizer
from plimsoll.files.store import Facts, Progress, Store, silent
from plimsoll.records.job import Job

if TYPE_CHECKING:  # the module imports torch
    from plimsoll.data.samples.packing import Packs

T = TypeVar("T")

LABELS_FILE = "labels.npy"


@dataclass(frozen=True)
class Stage(Generic[T]):
    """One step in the preparation of the texts of a job.

    Attributes:
        name: the name of the output.
        takes: the stages whose outputs this stage needs.
        gives: the function that makes the output from a `Pipeline` and the outputs in ``takes``. It may return a
            `Store` that can make the output.
    """

    name: str
    takes: tuple[Stage[Any], ...]
    gives: Callable[..., Store[T] | T]

    def depends_on(self, stage: Stage[Any]) -> bool:
        """Return whether a different output of ``stage`` may change the output of this stage."""
        return self == stage or any(taken.depends_on(stage) for taken in self.takes)


class Pipeline:
    """The preparation of the texts of a job. Each stage runs at most once, when it or a dependent stage is requested.

    Args:
        job: the job; its data, task and tokenizer are used.
        cache: the folder for all outputs.
        progress: called as ``progress(stage, done, total)``.
        budget_bytes: the limit of private memory of this process in bytes; ``None`` for no limit.
    """

    def __init__(self, job: Job, cache: Path, progress: Progress = silent, budget_bytes: int | None = None) -> None:
        self.job, self.cache, self.progress, self.budget_bytes = job, cache.absolute(), progress, budget_bytes
        self._outputs: dict[Stage[Any], Any] = {}

    def run(self, stage: Stage[T]) -> T:
        """Return the output of a stage, from the cache or made now, after running the stages that it needs."""
        if stage not in self._outputs:
            given = self._given(stage)
            self._outputs[stage] = given.made() if isinstance(given, Store) else given
        output: T = self._outputs[stage]
        return output

    def is_there(self, stage: Stage[Any]) -> bool:
        """Return whether the output of a stage is in the cache.

        To determine this, the outputs that the stage needs are made if they are missing.
        """
        given = self._given(stage)
        return not isinstance(given, Store) or given.is_there

    def replacing(self, outputs: Mapping[Stage[Any], Any]) -> Pipeline:
        """Return a pipeline in which some stages have the given outputs. Only stages that depend on them run again."""
        other = Pipeline(self.job, self.cache, self.progress, self.budget_bytes)
        kept = {stage: output for stage, output in self._outputs.items() if not any(map(stage.depends_on, outputs))}
        other._outputs = kept | dict(outputs)
        return other

    def _given(self, stage: Stage[T]) -> Store[T] | T:
        return stage.gives(self, *map(self.run, stage.takes))


def reading_of(job: Job) -> Reading:
    """Return the rules by which the files of a job are read as texts."""
    data = job.data
    return Reading(
        unit=data.unit,
        text=data.text,
        label=data.label,
        escapes=data.escapes,
        quotes=data.quotes,
        header=data.header,
        on_error=data.on_error,
        is_tagged=job.task == "token-classification",
    )


def _index(on: Pipeline, sources: Sequence[str]) -> Store[Corpus]:
    return open_corpus.declare(sources, reading_of(on.job), on.cache, on.progress)


def _validation_index(on: Pipeline) -> Store[Corpus] | None:
    share = on.job.data.validation
    return _index(on, (share,)) if isinstance(share, str) else None


def _other_files(_: Pipeline, corpus: Corpus, other: Corpus | None) -> Corpus | None:
    if other is not None:
        refuse_same_files(corpus, other)
    return other


def _repeated(on: Pipeline, corpus: Corpus, other: Corpus | None) -> Store[int] | int:
    if other is None and (not on.job.data.validation or len(corpus) < 2):
        return 0
    return num_repeated.declare(corpus, on.job, other, on.cache)


# Cache folders: index-*, named by the paths, sizes and times of files and by the reading; repeated-texts-*, named by
# the content of both corpora, or by the held-out share.
TEXTS: Stage[Corpus] = Stage("texts", (), lambda on: _index(on, on.job.data.sources))
VALIDATION_INDEX: Stage[Corpus | None] = Stage("validation index", (), _validation_index)
VALIDATION_TEXTS: Stage[Corpus | None] = Stage("validation texts", (TEXTS, VALIDATION_INDEX), _other_files)
REPEATED: Stage[int] = Stage("held-out texts among training texts", (TEXTS, VALIDATION_TEXTS), _repeated)


def _tokenizer(on: Pipeline, corpus: Corpus) -> Store[Tokenizer]:
    return prepare_tokenizer.declare(on.job.tokenizer, corpus, on.cache, on.progress, on.budget_bytes)


class Labels(NamedTuple):
    """The names of classes or tags. ``folder`` holds the class index of each text; ``None``: texts have no class."""

    names: tuple[str, ...] = ()
    folder: Path | None = None


def _labels(on: Pipeline, corpus: Corpus, known: tuple[str, ...] | None) -> Store[Labels] | Labels:
    if on.job.task == "token-classification":
        return Labels(tags_of(corpus, known))  # the tag indices are stored with the tokens
    if on.job.task != "classification":
        return Labels()
    names, numbers = labels_of(corpus, names_to_number_by(corpus, on.job.model) if known is None else known)
    folder = on.cache / f"labels-{hashlib.sha256(np.ascontiguousarray(numbers).data).hexdigest()[:16]}"

    def write(folder: Path) -> Facts:
        np.save(folder / LABELS_FILE, numbers)
        return {}

    return Store(folder, write, lambda folder, _: Labels(names, folder))


def _tokens(on: Pipeline, corpus: Corpus, tokenizer: Tokenizer) -> Store[TokenStore]:
    kinds = {"is_stream": on.job.reads_streams, "borders": on.job.data.borders is not None}
    return tokenize.declare(corpus, tokenizer, on.cache, on.progress, **kinds)


# Cache folders: tokenizer-*, named by its files, or by its training settings and texts; labels-*, named by the class
# indices; tokens-*, named by the content of the texts and the tokenizer.
TOKENIZER: Stage[Tokenizer] = Stage("tokenizer", (TEXTS,), _tokenizer)
KNOWN_NAMES: Stage[tuple[str, ...] | None] = Stage("known names of labels", (), lambda _: None)  # unknown by default
LABELS: Stage[Labels] = Stage("labels", (TEXTS, KNOWN_NAMES), _labels)
TOKENS: Stage[TokenStore] = Stage("tokens", (TEXTS, TOKENIZER), _tokens)


def _sides(on: Pipeline, corpus: Corpus) -> tuple[Side, Side]:
    share = on.job.data.validation
    assert isinstance(share, float), share
    return sides(len(corpus), share, on.job.seed, on.job.draws_held_out)


def _stream(_: Pipeline, tokens: TokenStore, side: Side | None) -> Store[Tokens] | Tokens:
    return tokens if side is None else choose_texts.declare(tokens, side.name, side.is_chosen)


def _spans(on: Pipeline, tokens: TokenStore, tokenizer: Tokenizer) -> Store[Spans]:
    job, data, template = on.job, on.job.data, tokenizer.template
    return cut_texts.declare(
        tokens,
        job.sequence_length,
        long_texts=data.long_texts,
        stride=data.stride,
        borders=data.borders,
        with_end=not (job.is_labelled or template.suffix),  # a suffix already marks the end
        template=template,
        keeps_end=tokenizer.keeps_end and data.long_texts == "truncate",
        progress=on.progress,
    )


def _chosen_spans(_: Pipeline, spans: Spans, side: Side | None) -> Store[Spans] | Spans:
    return spans if side is None else select_spans.declare(spans, side.name, side.is_chosen)


def _packs(on: Pipeline, spans: Spans) -> Store[Packs]:
    from plimsoll.data.samples.packing import pack

    return pack.declare(spans, progress=on.progress)


# Cache folders: tokens-*-texts-* and spans-*-train-*, named by the selected texts; spans-*, named by the tokens and
# the settings for cutting; spans-*-packs-*.
SIDES: Stage[tuple[Side, Side]] = Stage("texts to train on and those held out", (TEXTS,), _sides)
SIDE: Stage[Side | None] = Stage("side that samples are made of", (), lambda _: None)  # all texts by default
STREAM: Stage[Tokens] = Stage("texts end to end", (TOKENS, SIDE), _stream)
SPANS: Stage[Spans] = Stage("spans", (TOKENS, TOKENIZER), _spans)
CHOSEN_SPANS: Stage[Spans] = Stage("spans of a side", (SPANS, SIDE), _chosen_spans)
PACKS: Stage[Packs] = Stage("packs", (CHOSEN_SPANS,), _packs)
