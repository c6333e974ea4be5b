"""Training is deterministic and cached; what is loaded and saved is what transformers loads and saves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from plimsoll.data.corpus import Corpus
from plimsoll.data.formats import Reading
from plimsoll.data.index import open_corpus
from plimsoll.data.tokenizer import export_tokenizer, open_tokenizer, prepare_tokenizer
from plimsoll.errors import DataError
from plimsoll.records.job import TokenizerSource

TEXT = "the cat sat on the mat; the c\u00e4t s\u00e1t on the m\u00e4t \U0001f600\n  and the dog ran\n" * 50


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "text.txt").write_text(TEXT)
    return open_corpus((str(tmp_path / "text.txt"),), Reading(), tmp_path / "cache")


def bpe(corpus: Corpus, cache: Path, vocab_size: int = 280):
    return prepare_tokenizer(TokenizerSource(vocab_size=vocab_size), corpus, cache)


def test_a_trained_tokenizer_gives_the_text_back(corpus: Corpus, tmp_path: Path):
    tokenizer = bpe(corpus, tmp_path / "cache")
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.end_token) == (280, 0, "<|endoftext|>")
    for text in (TEXT, " x\u4e2d\0\r\n"):  # also what it has not seen: all 256 bytes are in the vocabulary
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.backend.encode(TEXT).ids) < len(TEXT) / 2


def test_training_gives_the_same_tokenizer_in_every_process(corpus: Corpus, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from plimsoll.data.index import open_corpus\n"
        "from plimsoll.data.formats import Reading\n"
        "from plimsoll.data.tokenizer import prepare_tokenizer; from plimsoll.records.job import TokenizerSource\n"
        "path, cache = sys.argv[1:]\n"
        "corpus = open_corpus((path,), Reading(), Path(cache))\n"
        "print(prepare_tokenizer(TokenizerSource(vocab_size=280), corpus, Path(cache)).key)"
    )
    command = [sys.executable, "-c", code, str(corpus.paths[0]), str(tmp_path / "other")]
    assert subprocess.check_output(command, text=True).strip() == bpe(corpus, tmp_path / "cache").key


def test_a_tokenizer_is_trained_once_for_each_corpus_and_size(corpus: Corpus, tmp_path: Path):
    stages = []
    for _ in range(2):
        prepare_tokenizer(
            TokenizerSource(vocab_size=280), corpus, tmp_path / "cache", lambda *progress: stages.append(progress)
        )
    assert stages == [("tokenizer", corpus.num_bytes, corpus.num_bytes)]
    assert bpe(corpus, tmp_path / "cache", vocab_size=270).folder != bpe(corpus, tmp_path / "cache").folder
    (tmp_path / "text.txt").write_text(TEXT.replace("cat", "cow"))
    other = open_corpus((str(tmp_path / "text.txt"),), Reading(), tmp_path / "cache")
    assert bpe(other, tmp_path / "cache").folder != bpe(corpus, tmp_path / "cache").folder


def test_transformers_loads_what_is_saved(corpus: Corpus, tmp_path: Path):
    tokenizer = bpe(corpus, tmp_path / "cache")
    (tmp_path / "model").mkdir()
    export_tokenizer(tokenizer.folder, tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (tmp_path / "model").iterdir()}
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (0, 0, 280)
    assert loaded(TEXT)["input_ids"] == tokenizer.backend.encode(TEXT).ids
    assert loaded.decode(loaded(TEXT)["input_ids"]) == TEXT


def test_a_saved_folder_or_file_is_loaded_as_the_same_tokenizer(corpus: Corpus, tmp_path: Path):
    tokenizer = bpe(corpus, tmp_path / "cache")
    (tmp_path / "model").mkdir()
    export_tokenizer(tokenizer.folder, tmp_path / "model")
    for path in (tmp_path / "model", tmp_path / "model" / "tokenizer.json"):
        loaded = prepare_tokenizer(TokenizerSource(path=str(path)), corpus, tmp_path / "cache")
        assert loaded.backend.encode(TEXT).ids == tokenizer.backend.encode(TEXT).ids
        assert (loaded.end_id, loaded.vocab_size) == (0, 280)
        assert open_tokenizer(loaded.folder).key == loaded.key


def word_level(tokens: list[str]) -> Backend:
    backend = Backend(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def load(folder: Path, corpus: Corpus, tokens: list[str], roles: dict[str, object] | None):
    folder.mkdir()
    backend = word_level(tokens)
    backend.enable_truncation(2)
    backend.enable_padding()
    backend.save(str(folder / "tokenizer.json"))
    if roles is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return prepare_tokenizer(TokenizerSource(path=str(folder)), corpus, folder.parent / "cache")


@pytest.mark.parametrize(
    ("roles", "end_token"),
    [
        ({"eos_token": "stop"}, "stop"),
        ({"eos_token": {"content": "stop", "lstrip": False}}, "stop"),
        ({"sep_token": "stop", "pad_token": "cat"}, "stop"),
        ({"eos_token": "not there", "sep_token": None}, "</s>"),
        (None, "</s>"),
    ],
)
def test_the_end_token_is_the_declared_one_or_a_customary_one(tmp_path: Path, corpus: Corpus, roles, end_token: str):
    tokenizer = load(tmp_path / "given", corpus, ["?", "cat", "stop", "</s>"], roles)
    assert tokenizer.end_token == end_token
    assert tokenizer.backend.encode("cat cat cat cat").ids == [1, 1, 1, 1]  # its truncation and padding are not ours


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path: Path, corpus: Corpus):
    backend = Backend(models.WordLevel({"?": 0, "cat": 1, "</s>": 900}, unk_token="?"))
    backend.save(str(tmp_path / "gaps.json"))
    tokenizer = prepare_tokenizer(TokenizerSource(path=str(tmp_path / "gaps.json")), corpus, tmp_path / "cache")
    assert (tokenizer.vocab_size, tokenizer.end_id) == (901, 900)


def test_an_older_folder_is_converted_by_transformers(tmp_path: Path, corpus: Corpus):
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    tokenizer = prepare_tokenizer(TokenizerSource(path=str(folder)), corpus, tmp_path / "cache")
    assert tokenizer.end_token == "[SEP]"
    assert tokenizer.backend.encode("the cats", add_special_tokens=False).ids == [5, 6, 7]


def test_what_cannot_be_loaded_is_an_error_with_a_remedy(tmp_path: Path, corpus: Corpus):
    def fails(path: Path, message: str):
        with pytest.raises(DataError, match=message):
            prepare_tokenizer(TokenizerSource(path=str(path)), corpus, tmp_path / "cache")

    fails(tmp_path / "absent", "there is no tokenizer at .*absent: give a folder")
    (tmp_path / "torn.json").write_text('{"version"')
    fails(tmp_path / "torn.json", r"torn\.json is not a tokenizer of the `tokenizers` library .*: give another")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "empty holds no tokenizer that transformers can load")
    word_level(["?", "cat"]).save(str(tmp_path / "endless.json"))
    fails(tmp_path / "endless.json", "no token for the end of a text: name one of its tokens as `eos_token`")


FORK = """
import os, sys
from pathlib import Path
from plimsoll.data.formats import Reading
from plimsoll.data.index import open_corpus
from plimsoll.data.tokenizer import prepare_tokenizer
from plimsoll.records.job import TokenizerSource

path, cache = sys.argv[1:]
corpus = open_corpus((path,), Reading(unit="line"), Path(cache))
tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=280), corpus, Path(cache))
child = os.fork()
if child == 0:
    tokenizer.backend.encode_batch(["the cat"] * 100)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.environ["TOKENIZERS_PARALLELISM"])
"""


@pytest.mark.parametrize(("chosen", "afterwards"), [(None, "false"), ("true", "true"), ("false", "false")])
def test_a_fork_after_training_gets_no_warning(corpus: Corpus, tmp_path: Path, chosen: str | None, afterwards: str):
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment |= {} if chosen is None else {"TOKENIZERS_PARALLELISM": chosen}
    code = (
        FORK if chosen != "true" else FORK.replace("    tokenizer.backend.encode_batch", "    len")
    )  # may hang: his choice
    command = [sys.executable, "-c", code, str(corpus.paths[0]), str(tmp_path / "forked")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{afterwards}\n", "")
