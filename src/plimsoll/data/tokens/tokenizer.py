"""The tokenizer of a job: an existing one, or one trained on a sample of the corpus; cached as a folder.

A trained tokenizer is byte-level BPE (Hugging Face ``tokenizers``), or a vocabulary of the most frequent words as split
by `plimsoll.data.tokens.words`. Training is deterministic: the same texts and settings give the same file. A trained
tokenizer adds no special tokens.

An existing tokenizer (`plimsoll.data.tokens.given_tokenizer`) is not changed. It puts its special tokens around each
text (`Tokenizer.template`), unless ``special_tokens: false`` is set. The export has its original files. Supported are a
``tokenizer.json``, and local folders that transformers loads as a fast tokenizer. A special token written in a text is
encoded as the special token, as ``AutoTokenizer`` does.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.data.text.corpus import Corpus
from plimsoll.data.tokens.byte_pairs import train as train_byte_pairs
from plimsoll.data.tokens.given_tokenizer import (
    CONFIG_FILE,
    END_TOKEN,
    TOKENIZER_FILE,
    Loaded,
    described,
    identity_of_tokenizer,
    load_tokenizer,
)
from plimsoll.data.tokens.template import NO_TEMPLATE, Template, template_of
from plimsoll.data.tokens.words import count_texts, word_pattern
from plimsoll.errors import DataError
from plimsoll.files.checksums import require_whole
from plimsoll.files.store import Facts, Progress, Store, kept, read_facts, silent
from plimsoll.records.base import write_atomically
from plimsoll.records.job import TokenizerSource

if TYPE_CHECKING:  # the training process imports this module, but must not load the library
    import tokenizers

UNKNOWN_TOKEN = "<|unk|>"  # id 1 of a word tokenizer, for words outside the vocabulary; decoding does not restore them
_SAMPLE_BYTES = 64 << 20  # the training sample, drawn evenly over the corpus
FEW_BYTES = 1 << 20
"""Corpora up to this size use one thread: training takes half a second, and the process can then still fork safely."""
_LEAST_COUNTED_WORDS, _COUNTED_WORDS_PER_TOKEN, _MOST_CHUNKS = 1 << 18, 4, 1 << 16
_RECIPE = 2  # increase it when training with the same settings gives other tokens
_LOADED_RECIPE = 2  # increase it when the same files give another tokenizer
_OWN = "own-"  # prefix, in the cache, of the files to export for a given tokenizer
_THREADS = "TOKENIZERS_PARALLELISM"
_USER_THREADS = os.environ.get(_THREADS)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, its folder in the cache, and its end-of-text token.

    ``template`` holds the special tokens around a text. ``keeps_end``: texts are truncated at the beginning, not at the
    end. ``is_given``: the tokenizer was loaded, not trained here. ``mask_token``, ``unknown_token`` and ``pad_token``
    are ``None`` if the tokenizer has no such token.
    """

    backend: tokenizers.Tokenizer
    folder: Path
    end_token: str
    mask_token: str | None = None
    unknown_token: str | None = None
    pad_token: str | None = None
    template: Template = NO_TEMPLATE
    keeps_end: bool = False
    is_given: bool = False
    num_left_out_words: int = 0  # dropped from the training words to bound memory

    @cached_property
    def key(self) -> str:
        """A hash of the whole tokenizer: equal keys give equal tokens."""
        if not self.is_given:
            return _hash(self.backend.to_str(), self.end_token)
        says_more = [str(_LOADED_RECIPE), str(self.backend.encode_special_tokens)]
        return _hash(self.backend.to_str(), self.end_token, *says_more)

    @cached_property
    def pad_id(self) -> int:
        """The padding token id, or the end token id if the tokenizer has no padding token."""
        number = None if self.pad_token is None else self.backend.token_to_id(self.pad_token)
        return self.end_id if number is None else number

    @cached_property
    def vocab_size(self) -> int:
        """The largest token id plus 1, so that every id is a row of an embedding of this size."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def end_id(self) -> int:
        """The id of the end token, which follows every text that is stored end to end with others."""
        number = self.backend.token_to_id(self.end_token)
        assert number is not None, f"{self.end_token!r} was found when the tokenizer was loaded"
        return number

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token, or ``None`` if the tokenizer has none."""
        return None if self.mask_token is None else self.backend.token_to_id(self.mask_token)

    @property
    def shown_template(self) -> str | None:
        """The special tokens around a text, such as ``[CLS] ... [SEP]``; ``None`` if the tokenizer adds none."""
        if not self.template.num_tokens:
            return None
        before, behind = ([str(self.backend.id_to_token(number)) for number in ids] for ids in self.template)
        return " ".join([*before, "...", *behind])

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of the end token and of all special tokens, ascending."""
        added = self.backend.get_added_tokens_decoder()
        named = {self.end_id, self.pad_id, *self.template.prefix, *self.template.suffix}
        return tuple(sorted({*named, *(number for number, token in added.items() if token.special)}))


@kept
def prepare_tokenizer(
    source: TokenizerSource,
    corpus: Corpus,
    cache: Path,
    progress: Progress = silent,
    budget_bytes: int | None = None,
) -> Store[Tokenizer]:
    """Load the tokenizer at ``source.path``, or train a tokenizer on ``corpus``, and cache it.

    Args:
        source: the path to load, or the settings of training, such as the size of the vocabulary (too little text gives
            a smaller one).
        corpus: the texts to train on.
        cache: the folder for the result.
        progress: called with the stage ``"tokenizer"``, and the done and total bytes of text.
        budget_bytes: the private memory that this process may use in bytes; ``None``: no budget.

    Raises:
        BudgetError: if training the tokenizer takes more memory than the budget.
        DataError: if ``source.path`` holds no tokenizer that can be loaded, or the tokenizer has no end token.
        OutputError: if the cache cannot be written.
    """
    if source.path is not None:
        path = Path(source.path)
        key = (str(_LOADED_RECIPE), str(source.special_tokens), *identity_of_tokenizer(path))

        def write(place: Path) -> Facts:
            return _write(place, load_tokenizer(path, source.special_tokens))
    else:
        key = tuple(map(str, _settings(source, corpus)))
        train = _train_words if source.train == "words" else partial(_train_bpe, budget_bytes=budget_bytes)

        def write(place: Path) -> Facts:
            backend, num_left_out = train(source, corpus, progress)
            return _write(place, Loaded(backend, END_TOKEN)) | {"num_left_out_words": num_left_out}

    return Store(cache / f"tokenizer-{_hash(*key)[:16]}", write, lambda folder, _: open_tokenizer(folder))


def open_tokenizer(folder: Path) -> Tokenizer:
    """Open a tokenizer that `prepare_tokenizer` cached.

    Raises:
        DataError: if the cached tokenizer is missing or damaged.
    """
    import tokenizers

    facts = _facts(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    backend.encode_special_tokens = facts.pop("splits_special", False)  # the library does not store this setting
    template = Template(*map(tuple, facts.pop("template", ())))
    return Tokenizer(backend, folder, template=template, **facts)


def padding_of(model: str | dict[str, Any], own: int) -> int:
    """Return the padding token id of the model's checkpoint, or ``own``, the tokenizer's padding id, if it has none.

    Decoders with a classification head use this id to find the last token of a text.
    """
    try:
        padding = json.loads((Path(str(model)) / "config.json").read_text(encoding="utf-8"))["pad_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return own
    return padding if isinstance(padding, int) and padding >= 0 else own


def export_tokenizer(folder: Path, target: Path) -> None:
    """Copy a tokenizer from the cache to a folder for ``transformers.AutoTokenizer.from_pretrained(target)``.

    It imports neither ``tokenizers`` nor ``transformers``, because the training process may lack the memory for them.

    Raises:
        DataError: if the tokenizer is missing from the cache or damaged.
        OutputError: if ``target`` cannot be written.
    """
    facts = _facts(folder)
    own = {path.name.removeprefix(_OWN): path.read_bytes() for path in sorted(folder.glob(f"{_OWN}*"))}
    if not own:
        end_token, unknown_token = facts["end_token"], facts.get("unknown_token")  # older caches do not have it
        roles = {"eos_token": end_token, "pad_token": end_token}
        roles |= {"unk_token": unknown_token} if unknown_token else {}
        own = {TOKENIZER_FILE: (folder / TOKENIZER_FILE).read_bytes(), CONFIG_FILE: described(roles)}
    for name, content in own.items():
        write_atomically(target / name, content, "cache folder")


def _facts(folder: Path) -> Facts:
    facts = read_facts(folder)
    if facts is None:
        raise DataError(
            f"the tokenizer {folder} is missing or damaged in the cache: prepare it again, as --resume does"
        )
    require_whole(folder)
    return facts


@contextmanager
def tokenizer_threads(are_worth_it: bool = True) -> Iterator[None]:
    """Allow ``tokenizers`` to use its threads inside the block if ``are_worth_it``, and forbid them afterwards.

    If a process forks after the library has started threads, the library writes a warning to standard error. If the
    child then tokenizes, it may hang. Setting ``TOKENIZERS_PARALLELISM`` to "false" after the block prevents both. If
    memory is limited, no threads are used: if a thread cannot get its stack, the library panics or hangs. A value set
    by the user is kept.
    """
    os.environ[_THREADS] = _USER_THREADS or ("true" if are_worth_it and not _is_limited() else "false")
    try:
        yield
    finally:
        os.environ[_THREADS] = _USER_THREADS or "false"


def _is_limited() -> bool:
    """Return whether this process has a limit on its memory that counts the stack of a thread."""
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _settings(source: TokenizerSource, corpus: Corpus) -> tuple[str | int, ...]:
    """Return all settings that determine the trained tokenizer."""
    import tokenizers

    settings = (_RECIPE, tokenizers.__version__, corpus.key, source.train, source.vocab_size)
    if source.train == "bpe":
        return settings
    return (*settings, source.min_count, source.lowercase, unicodedata.unidata_version)


def _write(folder: Path, loaded: Loaded) -> Facts:
    backend = loaded.backend
    backend.save(str(folder / TOKENIZER_FILE))
    for name, content in loaded.own_files.items():
        (folder / f"{_OWN}{name}").write_bytes(content)
    unknown_token = getattr(backend.model, "unk_token", None)
    is_known = unknown_token is not None and backend.token_to_id(unknown_token) is not None
    return {
        "end_token": loaded.end_token,
        "mask_token": loaded.mask_token,
        "unknown_token": unknown_token if is_known else None,
        "pad_token": loaded.pad_token,
        "template": template_of(backend),
        "keeps_end": loaded.keeps_end,
        "is_given": bool(loaded.own_files),
        "splits_special": backend.encode_special_tokens,
    }


def _train_bpe(
    source: TokenizerSource, corpus: Corpus, progress: Progress, budget_bytes: int | None
) -> tuple[tokenizers.Tokenizer, int]:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=source.vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with tokenizer_threads(corpus.num_bytes > FEW_BYTES):
        trained_on = train_byte_pairs(backend, _counted(corpus, progress), trainer, source.vocab_size, budget_bytes)
    return backend, trained_on.num_left_out


def _train_words(source: TokenizerSource, corpus: Corpus, progress: Progress) -> tuple[tokenizers.Tokenizer, int]:
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    most_words = max(_LEAST_COUNTED_WORDS, _COUNTED_WORDS_PER_TOKEN * source.vocab_size)
    counted = count_texts(_counted(corpus, progress), source.lowercase, most_words, _MOST_CHUNKS)
    tokens = [END_TOKEN, UNKNOWN_TOKEN, *counted.ranked(source.min_count)][: source.vocab_size]
    backend = Backend(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN_TOKEN))
    if source.lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(word_pattern()), behavior="removed", invert=True)
    backend.add_special_tokens([END_TOKEN, UNKNOWN_TOKEN])
    return backend, counted.num_left_out  # no decoder: decoding joins words with spaces


def _counted(corpus: Corpus, progress: Progress) -> Iterator[str]:
    done_bytes, total_bytes = 0, min(corpus.num_bytes, _SAMPLE_BYTES)
    for text in corpus.sample(_SAMPLE_BYTES):
        yield text
        done_bytes += len(text.encode())
        progress("tokenizer", done_bytes, total_bytes)
