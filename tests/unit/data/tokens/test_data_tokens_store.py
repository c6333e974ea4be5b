"""The flat file of tokens: its content, independence of the pieces that are tokenized, and completeness."""

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

import plimsoll.data.tokens.store
from plimsoll.data.formats import Reading
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.store import TokenStore, open_tokens, tokenize
from plimsoll.data.tokens.tokenizer import Tokenizer, prepare_tokenizer
from plimsoll.errors import DataError
from plimsoll.records.job import TokenizerSource

# https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py, cl100k_base; Llama 3 uses the same
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt4": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT4), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "bert": pre_tokenizers.BertPreTokenizer(),
}


def corpus_of(folder: Path, texts: list[str]) -> Corpus:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return open_corpus((str(folder),), Reading(), folder.parent / "cache")


def words(tmp_path: Path, vocab_size: int) -> Tokenizer:
    vocabulary = {"</s>": 0, "?": 1, "a": 2, "b": 3} | {f"w{number}": number for number in range(4, vocab_size)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, tmp_path, "</s>")


def test_each_text_is_followed_by_the_end_token(tmp_path: Path):
    corpus = corpus_of(tmp_path / "texts", ["a b a", "b", " \n", "a a"])
    store = tokenize(corpus, words(tmp_path, 4), tmp_path / "cache")
    assert store.tokens.tolist() == [2, 3, 2, 0, 3, 0, 0, 2, 2, 0]
    assert store.ends.tolist() == [3, 5, 6, 9]
    again = pickle.loads(pickle.dumps(store))
    assert again.tokens.tolist() == store.tokens.tolist()
    assert len(pickle.dumps(store)) < 500


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_take_the_smallest_type_that_holds_them(tmp_path: Path, vocab_size: int, dtype: str):
    corpus = corpus_of(tmp_path / "texts", [f"a w{vocab_size - 1}"])
    store = tokenize(corpus, words(tmp_path, vocab_size), tmp_path / "cache")
    assert store.tokens.dtype == dtype
    assert store.tokens.tolist() == [2, vocab_size - 1, 0]


@pytest.mark.parametrize("split", SPLITS)
def test_pieces_have_the_tokens_of_the_whole_text(tmp_path: Path, split: str):
    """Pieces of real source code with indentation, comments and blank lines have the tokens of the whole text."""
    text = "\n".join(Path(module.__file__).read_text() for module in (subprocess, pickle, signal)) * 3
    assert len(text) > 5 * 64 << 10
    backend = Backend(models.BPE(unk_token="?"))
    backend.pre_tokenizer = SPLITS[split]
    backend.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=600, special_tokens=["</s>", "?"], show_progress=False)
    )
    tokenizer = Tokenizer(backend, tmp_path, "</s>")
    store = tokenize(corpus_of(tmp_path / "texts", [text]), tokenizer, tmp_path / "cache")
    assert store.tokens.tolist() == [*backend.encode(text, add_special_tokens=False).ids, 0]


@pytest.mark.long
def test_batches_change_nothing(tmp_path: Path):
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(["a", "b"], size)) for size in generator.integers(1, 60_000, 50)]
    stages = []
    corpus, tokenizer = corpus_of(tmp_path / "texts", texts), words(tmp_path, 4)
    store = tokenize(corpus, tokenizer, tmp_path / "cache", lambda *progress: stages.append(progress))
    expected = [[*tokenizer.backend.encode(text).ids, 0] for text in texts]
    assert store.tokens.tolist() == [token for tokens in expected for token in tokens]
    assert (np.cumsum([len(tokens) for tokens in expected]) - 1).tolist() == store.ends.tolist()
    assert len(stages) > 2
    assert stages[-1] == ("tokens", corpus.num_bytes, corpus.num_bytes)


def test_tokens_are_made_once_for_each_corpus_and_tokenizer(tmp_path: Path):
    corpus = corpus_of(tmp_path / "texts", ["a b"])
    folders = [tokenize(corpus, words(tmp_path, size), tmp_path / "cache").folder for size in (4, 4, 5)]
    assert folders[0] == folders[1] != folders[2]
    before = (folders[0] / "manifest.json").stat().st_mtime_ns
    tokenize(corpus, words(tmp_path, 4), tmp_path / "cache")
    assert (folders[0] / "manifest.json").stat().st_mtime_ns == before


def test_torn_tokens_are_not_opened_and_made_again(tmp_path: Path):
    corpus = corpus_of(tmp_path / "texts", ["a b"])
    folder = tokenize(corpus, words(tmp_path, 4), tmp_path / "cache").folder
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(2)
    with pytest.raises(DataError, match="are missing from the cache, or damaged: prepare them again, as --resume does"):
        open_tokens(folder)
    store: TokenStore = tokenize(corpus, words(tmp_path, 4), tmp_path / "cache")
    assert store.tokens.tolist() == [2, 3, 0]


INTERRUPTED = """
import os, resource, signal, sys
from pathlib import Path
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.tokenizer import prepare_tokenizer
from plimsoll.data.tokens.store import tokenize
from plimsoll.records.job import TokenizerSource

path, cache, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
corpus = open_corpus((path,), Reading(), cache)
tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=300), corpus, cache)
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

def halfway(stage, done, total):
    if how == "kill" and done >= total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

tokenize(corpus, tokenizer, cache, halfway)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["kill", "full"])
def test_an_interrupted_tokenisation_leaves_no_store(tmp_path: Path, how: str):
    corpus = corpus_of(tmp_path / "texts", ["some words here " * 6_000] * 15)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "texts"), str(cache), how]
    done = subprocess.run(command, capture_output=True, text=True)
    if how == "kill":
        assert done.returncode == -signal.SIGKILL
    else:
        assert "plimsoll.errors.OutputError: cannot write the cache" in done.stderr
    tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=300), corpus, cache)
    folder = cache / f"tokens-{corpus.key[:16]}-{tokenizer.key[:16]}"
    with pytest.raises(DataError):
        open_tokens(folder)
    store = tokenize(corpus, tokenizer, cache)
    assert (store.folder, len(store.ends)) == (folder, 15)
    assert not list(cache.glob("*.part"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_batches", range(1, 6))
def test_what_was_interrupted_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch, num_batches: int):
    monkeypatch.setattr(plimsoll.data.tokens.store, "_BATCH_BYTES", 100_000)
    monkeypatch.setattr(plimsoll.data.tokens.store, "_SHARD_BYTES", 150_000)
    corpus = corpus_of(tmp_path / "texts", ["some words here " * repeats for repeats in (20_000, 10, 0, 20_000, 2)])
    tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=300), corpus, tmp_path / "cache")
    plain = tokenize(corpus, tokenizer, tmp_path / "plain")
    seen: list[int] = []

    def stop(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == num_batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(corpus, tokenizer, tmp_path / "cache", stop)
    (part,) = (tmp_path / "cache").glob("tokens-*.part")
    for name in ("tokens.bin", "ends.bin"):
        with (part / name).open("ab") as file:
            file.write(b"what a kill may leave beyond what the journal has")
    again: list[int] = []
    store = tokenize(corpus, tokenizer, tmp_path / "cache", lambda stage, done, total: again.append(done))
    assert store.tokens.tobytes() == plain.tokens.tobytes()
    assert store.ends.tolist() == plain.ends.tolist()
    assert len(again) == 6 - num_batches // 2 * 2  # a shard is two batches; complete shards are not tokenized again
    assert not part.exists()


@pytest.mark.parametrize("tear", ["tokens", "journal"])
def test_what_is_torn_of_an_interrupted_tokenisation_is_not_trusted(tmp_path: Path, monkeypatch, tear: str):
    monkeypatch.setattr(plimsoll.data.tokens.store, "_BATCH_BYTES", 100_000)
    monkeypatch.setattr(plimsoll.data.tokens.store, "_SHARD_BYTES", 100_000)
    corpus = corpus_of(tmp_path / "texts", ["some words here " * 20_000])
    tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=300), corpus, tmp_path / "cache")
    plain = tokenize(corpus, tokenizer, tmp_path / "plain")

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(corpus, tokenizer, tmp_path / "cache", stop)
    (part,) = (tmp_path / "cache").glob("tokens-*.part")
    if tear == "tokens":
        (part / "tokens.bin").write_bytes(b"1234")
    else:
        (part / "done.json").write_text("[1, 2")
    assert tokenize(corpus, tokenizer, tmp_path / "cache").tokens.tobytes() == plain.tokens.tobytes()
