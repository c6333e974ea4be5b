"""Tokenizers of a job: training is deterministic and cached; loading and saving agree with transformers."""

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from plimsoll.data.formats import Reading
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.tokenizer import (
    END_TOKEN,
    UNKNOWN_TOKEN,
    export_tokenizer,
    open_tokenizer,
    padding_of,
    prepare_tokenizer,
)
from plimsoll.data.tokens.words import words_of
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
    for text in (TEXT, " x\u4e2d\0\r\n"):  # also decodes unseen text, because all 256 bytes are in the vocabulary
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.backend.encode(TEXT).ids) < len(TEXT) / 2


def test_training_gives_the_same_tokenizer_in_every_process(corpus: Corpus, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from plimsoll.data.text.index import open_corpus\n"
        "from plimsoll.data.formats import Reading\n"
        "from plimsoll.data.tokens.tokenizer import prepare_tokenizer\n"
        "from plimsoll.records.job import TokenizerSource\n"
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


def of_words(corpus: Corpus, cache: Path, **fields):
    return prepare_tokenizer(TokenizerSource(train="words", **fields), corpus, cache)


def test_words_are_numbered_by_how_often_they_occur(corpus: Corpus, tmp_path: Path):
    tokenizer = of_words(corpus, tmp_path / "cache", vocab_size=9)
    # In each line of TEXT, "the" occurs 5 times, "on" 2, all others once. The first of these by text get an id.
    assert tokenizer.backend.get_vocab() == {
        END_TOKEN: 0, UNKNOWN_TOKEN: 1, "the": 2, "on": 3, ";": 4, "and": 5, "cat": 6, "c\u00e4t": 7, "dog": 8
    }  # fmt: skip
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.special_ids) == (9, 0, (0, 1))
    assert (tokenizer.end_token, tokenizer.unknown_token) == (END_TOKEN, UNKNOWN_TOKEN)
    ids = tokenizer.backend.encode("The cat;the\n dog-mat (and)").ids
    assert ids == [1, 6, 4, 2, 1, 1, 5, 1]
    assert tokenizer.backend.decode(ids) == "cat ; the and"
    assert tokenizer.backend.encode(" \u4e2d ").ids == [1]
    assert tokenizer.backend.encode("").ids == []


@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n-.,'nt1")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_tokenizer_cuts_the_words_that_are_counted(corpus: Corpus, tmp_path: Path, text: str):
    tokenizer = of_words(corpus, tmp_path / "cache")
    known = tokenizer.backend.get_vocab()
    assert tokenizer.backend.encode(text).ids == [known.get(word, 1) for word in words_of(text)]


def test_rare_words_and_capitals_can_be_left_out(tmp_path: Path):
    (tmp_path / "text.txt").write_text("One two TWO Three three three \u039f\u03a3 \u03bf\u03c3")
    corpus = open_corpus((str(tmp_path / "text.txt"),), Reading(), tmp_path / "cache")
    vocabulary = of_words(corpus, tmp_path / "cache", min_count=2, lowercase=True).backend.get_vocab()
    assert vocabulary == {END_TOKEN: 0, UNKNOWN_TOKEN: 1, "three": 2, "two": 3, "\u03bf\u03c3": 4}
    tokenizer = of_words(corpus, tmp_path / "cache", min_count=2, lowercase=True)
    assert tokenizer.backend.encode("TWO One \u039f\u03a3").ids == [3, 1, 4]
    assert of_words(corpus, tmp_path / "cache", min_count=2).backend.get_vocab().keys() == {
        END_TOKEN, UNKNOWN_TOKEN, "three"
    }  # fmt: skip
    assert of_words(corpus, tmp_path / "cache", min_count=9).vocab_size == 2


def test_transformers_loads_words_with_the_unknown_one(corpus: Corpus, tmp_path: Path):
    tokenizer = of_words(corpus, tmp_path / "cache", vocab_size=9)
    (tmp_path / "model").mkdir()
    export_tokenizer(tokenizer.folder, tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (loaded.unk_token, loaded.unk_token_id, loaded.eos_token_id, loaded.pad_token_id) == (UNKNOWN_TOKEN, 1, 0, 0)
    assert len(loaded) == 9
    assert loaded(TEXT)["input_ids"] == tokenizer.backend.encode(TEXT).ids
    assert loaded.decode(loaded("the cat; the cow")["input_ids"]) == "the cat ; the <|unk|>"
    again = prepare_tokenizer(TokenizerSource(path=str(tmp_path / "model")), corpus, tmp_path / "cache")
    assert (again.end_id, again.unknown_token, again.vocab_size) == (0, UNKNOWN_TOKEN, 9)


def test_only_a_known_unknown_token_is_named(tmp_path: Path, corpus: Corpus):
    for name, vocabulary, expected in (("a", {"?": 0, "</s>": 1}, "?"), ("b", {"</s>": 0}, None)):
        Backend(models.WordLevel(vocabulary, unk_token="?")).save(str(tmp_path / f"{name}.json"))
        tokenizer = prepare_tokenizer(TokenizerSource(path=str(tmp_path / f"{name}.json")), corpus, tmp_path / "cache")
        assert tokenizer.unknown_token == expected
        export_tokenizer(tokenizer.folder, tmp_path)
        assert json.loads((tmp_path / "tokenizer_config.json").read_text()).get("unk_token") == expected


def test_what_words_are_made_with_is_in_their_name_and_not_in_that_of_bpe(corpus: Corpus, tmp_path: Path):
    import tokenizers

    cache = tmp_path / "cache"
    sources = [{}, {"min_count": 2}, {"lowercase": True}, {"vocab_size": 5}]
    assert (
        len({of_words(corpus, cache, **fields).folder for fields in sources} | {bpe(corpus, cache, 8000).folder}) == 5
    )
    settings = "\0".join(["2", tokenizers.__version__, corpus.key, "bpe", "280"])
    assert bpe(corpus, cache).folder.name == f"tokenizer-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"


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
        ({"eos_token": {"__type": "AddedToken", "content": "stop", "lstrip": False}}, "stop"),
        ({"sep_token": "stop", "pad_token": "cat"}, "stop"),
        ({"eos_token": "not there", "sep_token": None}, "not there"),  # transformers adds this token
        (None, "</s>"),
    ],
)
def test_the_end_token_is_the_declared_one_or_a_customary_one(tmp_path: Path, corpus: Corpus, roles, end_token: str):
    tokenizer = load(tmp_path / "given", corpus, ["?", "cat", "stop", "</s>"], roles)
    assert tokenizer.end_token == end_token
    # its settings for truncation and padding are ignored
    assert tokenizer.backend.encode("cat cat cat cat").ids == [1, 1, 1, 1]


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
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.tokenizer import prepare_tokenizer
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


@pytest.mark.cold  # the variable is read when the module is loaded
@pytest.mark.parametrize(("chosen", "afterwards"), [(None, "false"), ("true", "true"), ("false", "false")])
def test_a_fork_after_training_gets_no_warning(corpus: Corpus, tmp_path: Path, chosen: str | None, afterwards: str):
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment |= {} if chosen is None else {"TOKENIZERS_PARALLELISM": chosen}
    code = (
        FORK if chosen != "true" else FORK.replace("    tokenizer.backend.encode_batch", "    len")
    )  # may hang, because the user chose it
    command = [sys.executable, "-c", code, str(corpus.paths[0]), str(tmp_path / "forked")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{afterwards}\n", "")


UNDER_A_LIMIT = """
import os, resource, sys
from pathlib import Path
from plimsoll.data.tokens.tokenizer import open_tokenizer, tokenizer_threads

tokenizer = open_tokenizer(Path(sys.argv[1]))
num_threads = len(os.listdir("/proc/self/task"))
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]), resource.RLIM_INFINITY))
with tokenizer_threads():
    print(len(tokenizer.backend.encode_batch_fast(["the cat"] * 100)))
print(len(os.listdir("/proc/self/task")) - num_threads)
"""


@pytest.mark.parametrize(("limit_bytes", "has_threads"), [(1 << 40, False), (resource.RLIM_INFINITY, True)])
def test_no_thread_is_started_where_memory_is_limited(corpus: Corpus, tmp_path: Path, limit_bytes, has_threads):
    """No thread is started if memory is limited.

    The library panics if a thread gets no stack, and with RUST_BACKTRACE it may hang while it prints the panic.
    """
    tokenizer = prepare_tokenizer(TokenizerSource(vocab_size=280), corpus, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", UNDER_A_LIMIT, str(tokenizer.folder), str(limit_bytes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    num_texts, num_threads = map(int, done.stdout.split())
    assert (num_texts, num_threads > 0) == (100, has_threads)


@pytest.mark.parametrize(("said", "padding"), [(7, 7), (None, 3), (-1, 3), ("x", 3)])
def test_rows_are_filled_with_the_checkpoints_own_token(tmp_path: Path, said: object, padding: int):
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": said}))
    assert padding_of(str(tmp_path), 3) == padding
    assert padding_of(str(tmp_path / "absent"), 3) == padding_of({"architecture": "gpt2"}, 3) == 3
