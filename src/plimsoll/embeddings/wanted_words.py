"""The words whose vectors are wanted: words of a file, of a tokenizer, or of texts.

WantedWords(corpus=("corpus/*.txt",), min_count=3).vocabulary_in(cache)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.embeddings.conversion import export
from plimsoll.embeddings.subsets import take_subset
from plimsoll.embeddings.vocabulary import Vocabulary, of_counts, of_tokenizer, said_padding, vocabulary_of
from plimsoll.errors import EmbeddingError
from plimsoll.files.store import Progress, silent
from plimsoll.records.base import cache_folder
from plimsoll.records.embeddings import SubsetFacts
from plimsoll.records.job import Job


@dataclass(frozen=True)
class WantedWords:
    """The wanted words, given by exactly one of ``vocabulary``, ``tokenizer`` and ``corpus``.

    Args:
        vocabulary: a file with a word per line.
        tokenizer: a tokenizer's file or folder.
        corpus: texts (files, folders, patterns), or a job file. Their words are counted.
        changes: settings for reading a corpus, each as ``field.name=value``.
        min_count: leave out words of a corpus that are used less often.
        max_words: keep at most this number of words of a corpus, the most frequent ones; ``None``: all.
        padding: the word whose row is zeros. ``None``: a tokenizer's padding token, ``<pad>`` for a corpus, no word for
            a vocabulary file.
    """

    vocabulary: Path | None = None
    tokenizer: Path | None = None
    corpus: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    min_count: int = 1
    max_words: int | None = None
    padding: str | None = None

    def vocabulary_in(self, cache: Path | None = None, progress: Progress = silent) -> Vocabulary:
        """Return the wanted words. The index of a corpus is cached in the folder ``cache``; ``None``: the user's cache.

        Raises:
            EmbeddingError: if not exactly one source is given.
            DataError: if a corpus or a tokenizer cannot be used.
        """
        self._check()
        if self.corpus:
            return vocabulary_of(self._counted(cache, progress), self.padding)
        if self.tokenizer is None:
            return vocabulary_of(self.vocabulary, self.padding)
        from plimsoll.data.tokens.given_tokenizer import load_tokenizer

        padding = self.padding or said_padding(self.tokenizer)
        return of_tokenizer(load_tokenizer(self.tokenizer).backend, str(self.tokenizer), padding)

    def rows_of(
        self,
        vectors: Path,
        output: Path | None = None,
        cache: Path | None = None,
        progress: Progress = silent,
        **options: Any,
    ) -> SubsetFacts:
        """Take the rows of the words from a file of word vectors, and write them to ``output`` if it is given.

        ``options`` are options of `plimsoll.embeddings.subsets.take_subset`.

        Raises:
            EmbeddingError: see `vocabulary_in`, `plimsoll.embeddings.subsets.take_subset` and
                `plimsoll.embeddings.conversion.export`.
            OutputError: if the output or the cache cannot be written.
        """
        found = take_subset(vectors, self.vocabulary_in(cache, progress), cache=cache, progress=progress, **options)
        if output is not None:
            export(found.table, output)
        return found.facts

    def _check(self) -> None:
        options = {"--vocabulary": self.vocabulary, "--tokenizer": self.tokenizer, "--corpus": self.corpus}
        given = [name for name, value in options.items() if value]
        if len(given) != 1:
            raise EmbeddingError(
                f"the words must come from one option, not {len(given)} ({', '.join(given) or 'none'}): give one of "
                "--vocabulary FILE, --tokenizer PATH and --corpus TEXTS"
            )
        of_a_corpus = {"--min-count": self.min_count > 1, "--max-words": self.max_words, "--set": self.changes}
        if not self.corpus and (ignored := [name for name, value in of_a_corpus.items() if value]):
            raise EmbeddingError(f"{' and '.join(ignored)} needs --corpus: leave it out, or give --corpus too")

    def _counted(self, cache: Path | None, progress: Progress) -> Vocabulary:
        from plimsoll.data.pipeline import TEXTS, Pipeline
        from plimsoll.data.tokens.words import count_words

        job = Job.from_file_or_texts(self.corpus, self.changes)
        pipeline = Pipeline(job, cache or cache_folder() / "data", progress)
        found = count_words(pipeline.run(TEXTS), progress=progress)
        counts = ((word, found.counts[word]) for word in found.ranked())
        name = ", ".join(self.corpus)
        if found.most_missed:
            name += f" (counts may be up to {found.most_missed:,} too low)"
        return of_counts(counts, name, self.max_words, self.min_count)
