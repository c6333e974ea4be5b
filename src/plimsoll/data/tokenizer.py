"""The tokenizer: an existing one, or one trained on a sample of the corpus; kept in the cache as a folder.

Trained is byte-level BPE (Hugging Face ``tokenizers``), or the most frequent words, as `plimsoll.data.words` cuts them.
Training sees at most 64 MiB of text, drawn evenly over the corpus, of which it counts only so many distinct words
(`plimsoll.data.byte_pairs`), and is deterministic: the same texts and settings give the same file. Id 0 of a trained
tokenizer is ``<|endoftext|>``, which stands between texts and fills padding; id 1 of one of words is ``<|unk|>``, which
stands for all others, so that it does not give a text back.

Covers any tokenizer that has a ``tokenizer.json`` or that ``transformers.AutoTokenizer`` can load from a local folder
as a fast one; does NOT download, and does NOT keep chat templates. A special token written out in a text is read as the
special token, as ``AutoTokenizer`` does.
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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plimsoll.data.byte_pairs import train as train_byte_pairs
from plimsoll.data.corpus import Corpus
from plimsoll.data.words import count_texts, word_pattern
from plimsoll.errors import DataError
from plimsoll.records.base import write_atomically
from plimsoll.records.job import TokenizerSource
from plimsoll.store import Facts, Progress, read_facts, silent, stored

if TYPE_CHECKING:  # the training process imports this module, but need not pay for the library
    import tokenizers

END_TOKEN, UNKNOWN_TOKEN = "<|endoftext|>", "<|unk|>"
_SAMPLE_BYTES = 64 << 20
_LEAST_COUNTED_WORDS, _COUNTED_WORDS_PER_TOKEN, _MOST_CHUNKS = 1 << 18, 4, 1 << 16
_RECIPE = 2  # raise it when training with the same settings gives other tokens
_TOKENIZER_FILE = "tokenizer.json"
_END_ROLES = ("eos_token", "sep_token", "pad_token")
_ROLES = (*_END_ROLES, "mask_token")
_MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>", "<mask_1>")
_END_NAMES = (END_TOKEN, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
_THREADS = "TOKENIZERS_PARALLELISM"
_USER_THREADS = os.environ.get(_THREADS)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, its folder in the cache, and its token for the end of a text."""

    backend: tokenizers.Tokenizer
    folder: Path
    end_token: str
    mask_token: str | None = None
    unknown_token: str | None = None
    num_left_out_words: int = 0  # of those that it was trained on, for the bound on memory

    @cached_property
    def key(self) -> str:
        """A hash of the whole tokenizer: equal keys give equal tokens."""
        return _key(self.backend, self.end_token)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, so every id is a row of an embedding of this size."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def end_id(self) -> int:
        """The token that stands after every text and fills the short rows of a batch."""
        number = self.backend.token_to_id(self.end_token)
        assert number is not None, f"{self.end_token!r} was found when the tokenizer was loaded"
        return number

    @property
    def mask_id(self) -> int | None:
        """The token that stands for a masked one, if there is one."""
        return None if self.mask_token is None else self.backend.token_to_id(self.mask_token)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The end token and all that the tokenizer calls special."""
        added = self.backend.get_added_tokens_decoder()
        return tuple(sorted({self.end_id, *(number for number, token in added.items() if token.special)}))


def prepare_tokenizer(source: TokenizerSource, corpus: Corpus, cache: Path, progress: Progress = silent) -> Tokenizer:
    """Load the tokenizer ``source.path``, or train one on ``corpus``, and keep it in the cache.

    Args:
        source: what to load, or the size of the vocabulary to train (too little text gives a smaller one).
        corpus: the texts to train on.
        cache: the folder for the result.
        progress: called with the stage ``"tokenizer"``.

    Raises:
        DataError: if ``source.path`` holds no tokenizer that can be loaded, or one without an end token.
        OutputError: if the cache cannot be written.
    """
    if source.path is not None:
        loaded = load_tokenizer(Path(source.path))
        folder = cache / f"tokenizer-{_hash(_key(loaded.backend, loaded.end_token), loaded.mask_token or '')[:16]}"
        stored(folder, lambda place: _write(place, loaded))
    else:
        folder = cache / f"tokenizer-{_hash(*map(str, _settings(source, corpus)))[:16]}"
        train = _train_words if source.train == "words" else _train_bpe

        def write(place: Path) -> Facts:
            backend, num_left_out = train(source, corpus, progress)
            return _write(place, Loaded(backend, END_TOKEN)) | {"num_left_out_words": num_left_out}

        stored(folder, write)
    return open_tokenizer(folder)


def open_tokenizer(folder: Path) -> Tokenizer:
    """Open a tokenizer that `prepare_tokenizer` put into the cache.

    Raises:
        DataError: if it is gone or torn.
    """
    import tokenizers

    facts = _facts(folder)
    return Tokenizer(tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER_FILE)), folder, **facts)


def export_tokenizer(folder: Path, target: Path) -> None:
    """Copy a tokenizer from the cache to where ``transformers.AutoTokenizer.from_pretrained(target)`` finds it.

    It imports neither ``tokenizers`` nor ``transformers``, whose memory the training process may not have to spare.

    Raises:
        DataError: if the tokenizer is gone from the cache or torn.
        OutputError: if ``target`` cannot be written.
    """
    facts = _facts(folder)
    end_token, unknown_token = facts["end_token"], facts.get("unknown_token")  # caches of before do not name it
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_token, "pad_token": end_token}
    config |= {"unk_token": unknown_token} if unknown_token else {}
    write_atomically(target / _TOKENIZER_FILE, (folder / _TOKENIZER_FILE).read_bytes(), "cache folder")
    write_atomically(target / "tokenizer_config.json", json.dumps(config, indent=2).encode(), "cache folder")


def _facts(folder: Path) -> Facts:
    facts = read_facts(folder)
    if facts is None:
        raise DataError(f"the tokenizer {folder} is gone from the cache, or torn: prepare it again, as --resume does")
    return facts


@contextmanager
def tokenizer_threads() -> Iterator[None]:
    """Let ``tokenizers`` use its threads inside, and none after.

    A process that forks after the library has started threads would get a warning on standard error and, if the child
    tokenises, might hang; with the variable set to "false" from then on neither happens. Where memory is limited there
    are none: a thread may be refused its stack, and the library panics or hangs. A value the user set stays.
    """
    os.environ[_THREADS] = _USER_THREADS or ("false" if _is_limited() else "true")
    try:
        yield
    finally:
        os.environ[_THREADS] = _USER_THREADS or "false"


def _is_limited() -> bool:
    """Whether this process has a limit on its memory that a thread's stack counts against."""
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _key(backend: tokenizers.Tokenizer, end_token: str) -> str:
    return _hash(backend.to_str(), end_token)


def _settings(source: TokenizerSource, corpus: Corpus) -> tuple[str | int, ...]:
    """Return everything the trained tokenizer depends on."""
    import tokenizers

    settings = (_RECIPE, tokenizers.__version__, corpus.key, source.train, source.vocab_size)
    if source.train == "bpe":
        return settings
    return (*settings, source.min_count, source.lowercase, unicodedata.unidata_version)


def _write(folder: Path, loaded: Loaded) -> Facts:
    loaded.backend.save(str(folder / _TOKENIZER_FILE))
    unknown_token = getattr(loaded.backend.model, "unk_token", None)
    is_known = unknown_token is not None and loaded.backend.token_to_id(unknown_token) is not None
    return {
        "end_token": loaded.end_token,
        "mask_token": loaded.mask_token,
        "unknown_token": unknown_token if is_known else None,
    }


def _train_bpe(source: TokenizerSource, corpus: Corpus, progress: Progress) -> tuple[tokenizers.Tokenizer, int]:
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
    with tokenizer_threads():
        trained_on = train_byte_pairs(backend, _counted(corpus, progress), trainer, source.vocab_size)
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
    return backend, counted.num_left_out  # without a decoder: words are put together with spaces


def _counted(corpus: Corpus, progress: Progress) -> Iterator[str]:
    done_bytes, total_bytes = 0, min(corpus.num_bytes, _SAMPLE_BYTES)
    for text in corpus.sample(_SAMPLE_BYTES):
        yield text
        done_bytes += len(text.encode())
        progress("tokenizer", done_bytes, total_bytes)


class Loaded(NamedTuple):
    """A tokenizer that is not in the cache yet, with its tokens for the end of a text and, if any, for a mask."""

    backend: tokenizers.Tokenizer
    end_token: str
    mask_token: str | None = None


def load_tokenizer(path: Path) -> Loaded:
    """Load an existing tokenizer, and name its token for the end of a text.

    Raises:
        DataError: if there is none that can be loaded, or it has no such token.
    """
    if not path.exists():
        raise DataError(f"there is no tokenizer at {path}: give a folder with a {_TOKENIZER_FILE}, or such a file")
    file = path / _TOKENIZER_FILE if path.is_dir() else path
    backend, roles = _from_file(file) if file.is_file() else _from_transformers(path)
    end_token = _first_known(backend, roles, _END_ROLES, _END_NAMES)
    if end_token is None:
        raise DataError(
            f"the tokenizer {path} has no token for the end of a text: name one of its tokens as `eos_token` in the "
            f"tokenizer_config.json beside it"
        )
    backend.no_truncation()
    backend.no_padding()
    return Loaded(backend, end_token, _first_known(backend, roles, ("mask_token",), _MASK_NAMES))


def _first_known(
    backend: tokenizers.Tokenizer, roles: dict[str, str], wanted: tuple[str, ...], names: tuple[str, ...]
) -> str | None:
    """Return the token of the first of these roles that has one, or of these names."""
    tokens = [roles[role] for role in wanted if roles.get(role)] + list(names)
    return next((token for token in tokens if backend.token_to_id(token) is not None), None)


def _from_file(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Read a tokenizer and the roles of its special tokens, which stand in a file beside it."""
    import tokenizers

    roles: dict[str, Any] = {}
    try:
        backend = tokenizers.Tokenizer.from_buffer(file.read_bytes())
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (beside := file.with_name(name)).is_file():
                roles |= json.loads(beside.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not a tokenizer of the `tokenizers` library ({error}): give another") from None
    return backend, {role: _content(roles[role]) for role in _ROLES if roles.get(role)}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _from_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Let transformers convert what older folders hold (vocab.json and merges.txt, vocab.txt, sentencepiece)."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, use_fast=True)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{folder} holds no tokenizer that transformers can load ({error}): give another") from None
    if not loaded.is_fast:
        raise DataError(f"the tokenizer in {folder} has no fast form: convert it to a {_TOKENIZER_FILE} first")
    return loaded.backend_tokenizer, {role: getattr(loaded, role) for role in _ROLES if getattr(loaded, role)}
