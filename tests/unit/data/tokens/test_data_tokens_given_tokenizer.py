"""Existing tokenizers: loaded as transformers loads them, and exported unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from made_tokenizers import KINDS, ROLES, TEMPLATES, byte_level, saved, with_template, word_piece
from plimsoll.data.formats import Reading
from plimsoll.data.text.corpus import Corpus
from plimsoll.data.text.index import open_corpus
from plimsoll.data.tokens.given_tokenizer import load_tokenizer
from plimsoll.data.tokens.tokenizer import Tokenizer, export_tokenizer, open_tokenizer, prepare_tokenizer
from plimsoll.errors import DataError
from plimsoll.records.job import TokenizerSource

TEXTS = ["The cat sat on the mat.", "A day in the U.S.", "nothing else  here"] * 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("\n".join(TEXTS))
    return open_corpus((str(folder / "text.txt"),), Reading(), folder / "cache")


@pytest.fixture(scope="module", params=KINDS)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    backend = with_template(KINDS[kind](TEXTS), TEMPLATES[kind])
    folder = saved(tmp_path_factory.mktemp(kind) / "tokenizer", backend, kind)
    (folder / "special_tokens_map.json").write_text(json.dumps(ROLES[kind]))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("no part of it")
    return folder


def prepared(path: Path, corpus: Corpus, cache: Path, **fields: bool) -> Tokenizer:
    return prepare_tokenizer(TokenizerSource(path=str(path), **fields), corpus, cache)


def exported(tokenizer: Tokenizer, target: Path, model_type: str = "gpt2") -> Path:
    """Export a tokenizer to a model folder.

    The model's configuration decides which class transformers takes if the tokenizer does not name one.
    """
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": model_type}))
    export_tokenizer(tokenizer.folder, target)
    return target


def test_its_files_are_exported_byte_for_byte(given: Path, corpus: Corpus, tmp_path: Path):
    target = exported(prepared(given, corpus, tmp_path / "cache"), tmp_path / "model")
    own = {path.name: path.read_bytes() for path in given.iterdir() if path.name != "README.md"}
    assert {path.name: path.read_bytes() for path in target.iterdir() if path.name != "config.json"} == own
    theirs, ours = AutoTokenizer.from_pretrained(given), AutoTokenizer.from_pretrained(target)
    assert (ours.special_tokens_map, ours.padding_side) == (theirs.special_tokens_map, theirs.padding_side)
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]


def test_it_is_opened_from_the_cache_as_it_was_loaded(given: Path, corpus: Corpus, tmp_path: Path):
    tokenizer, theirs = prepared(given, corpus, tmp_path / "cache"), AutoTokenizer.from_pretrained(given)
    assert open_tokenizer(tokenizer.folder) == tokenizer or open_tokenizer(tokenizer.folder).key == tokenizer.key
    assert tokenizer.pad_id == theirs.pad_token_id
    around = [*tokenizer.template.prefix, *tokenizer.template.suffix]
    assert around == theirs("")["input_ids"] != []
    assert set(around) <= set(tokenizer.special_ids)
    shown = " ".join(theirs.convert_ids_to_tokens(around))
    assert (tokenizer.shown_template or "").replace("... ", "").replace(" ...", "") == shown


def test_without_its_special_tokens_it_is_another_one_that_keeps_its_roles(given: Path, corpus: Corpus, tmp_path: Path):
    on = prepared(given, corpus, tmp_path / "cache")
    off = prepared(given, corpus, tmp_path / "cache", special_tokens=False)
    assert off.key != on.key
    assert off.template.num_tokens == 0
    theirs = AutoTokenizer.from_pretrained(given)
    ours = AutoTokenizer.from_pretrained(exported(off, tmp_path / "model", model_type="bert"))
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS, add_special_tokens=False)["input_ids"]
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_a_lone_file_is_exported_with_names_for_its_tokens(given: Path, corpus: Corpus, tmp_path: Path):
    shutil.copyfile(given / "tokenizer.json", tmp_path / "lone.json")
    target = exported(prepared(tmp_path / "lone.json", corpus, tmp_path / "cache"), tmp_path / "model")
    assert (target / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    theirs, ours = AutoTokenizer.from_pretrained(given), AutoTokenizer.from_pretrained(target)
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    assert ours.pad_token == theirs.pad_token
    assert {role: getattr(ours, role) for role in ("unk_token", "mask_token")} == {
        role: getattr(theirs, role) for role in ("unk_token", "mask_token")
    }


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "byte_level"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"}, "byte_level"),
        ({"add_bos_token": True, "add_eos_token": True}, "byte_level"),
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": False}, "word_piece"),
        ({"split_special_tokens": True}, "word_piece"),
        ({"eos_token": "a token of its own"}, "word_piece"),
    ],
    ids=str,
)
def test_what_the_configuration_overrules_is_overruled(settings: dict, kind: str, corpus: Corpus, tmp_path: Path):
    folder = saved(tmp_path / "tokenizer", KINDS[kind](TEXTS), kind, **settings)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("\n".join(sorted(backend.get_vocab(), key=backend.get_vocab().get)))
    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer = prepared(folder, corpus, tmp_path / "cache")
    texts = [*TEXTS[:3], "The [SEP] cat </s>"]
    for adds in (True, False):
        expected = theirs(texts, add_special_tokens=adds)["input_ids"]
        assert [tokenizer.backend.encode(text, add_special_tokens=adds).ids for text in texts] == expected
    ours = AutoTokenizer.from_pretrained(exported(tokenizer, tmp_path / "model"))
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    assert tokenizer.vocab_size >= len(theirs)


def test_a_class_that_follows_from_the_model_is_named(corpus: Corpus, tmp_path: Path):
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    tokenizer = prepared(folder, corpus, tmp_path / "cache")
    assert tokenizer.shown_template == "[CLS] ... [SEP]"
    target = exported(tokenizer, tmp_path / "model", model_type="gpt2")
    assert (target / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()
    ours = AutoTokenizer.from_pretrained(target)
    assert ours("The cats")["input_ids"] == [2, 5, 6, 7, 3]
    assert (ours.pad_token, ours.mask_token, ours.sep_token) == ("[PAD]", "[MASK]", "[SEP]")


def test_another_template_is_another_tokenizer_and_its_texts_are_other_tokens(corpus: Corpus, tmp_path: Path):
    backend = word_piece(TEXTS)
    keys, folders = set(), set()
    for number, single in enumerate(("$A", "[CLS] $A", "[CLS] $A [SEP]")):
        folder = saved(tmp_path / str(number), with_template(backend, single), "word_piece")
        tokenizer = prepared(folder, corpus, tmp_path / "cache")
        keys.add(tokenizer.key)
        folders.add(tokenizer.folder)
    assert (len(keys), len(folders)) == (3, 3)


def test_a_side_of_truncation_is_known(corpus: Corpus, tmp_path: Path):
    folder = saved(tmp_path / "tokenizer", byte_level(TEXTS), "byte_level", truncation_side="left")
    assert prepared(folder, corpus, tmp_path / "cache").keeps_end
    off = prepared(folder, corpus, tmp_path / "cache", special_tokens=False)
    assert AutoTokenizer.from_pretrained(exported(off, tmp_path / "model")).truncation_side == "left"


def test_code_of_a_folder_is_not_run(tmp_path: Path):
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    folder = saved(tmp_path / "tokenizer", word_piece(TEXTS), "word_piece", **own)
    (folder / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(DataError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(folder)
