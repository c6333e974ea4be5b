"""The words that get rows: from files, tokenizers, counts and any iterable."""

from collections import Counter
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from plimsoll.embeddings.vocabulary import Vocabulary, of_counts, of_tokenizer, said_padding, vocabulary_of
from plimsoll.errors import EmbeddingError


def test_a_file_has_a_word_per_line_whose_number_is_its_row(tmp_path: Path):
    path = tmp_path / "vocabulary.txt"
    path.write_bytes("\ufeffthe\r\n\nof\t12\t13\na b\nx\u2028y\n\x85z\n\n\n".encode())
    words = vocabulary_of(path)
    assert words.words == ["the", None, "of", "a b", "x\u2028y", "\x85z"]
    assert (words.name, words.counts, words.padding, len(words)) == (str(path), None, None, 6)
    assert vocabulary_of(str(path), "of").padding == 2


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"\r\n"])
def test_a_file_without_words_is_an_error(tmp_path: Path, raw: bytes):
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(EmbeddingError, match=r"x holds 0 words: give at least one"):
        vocabulary_of(tmp_path / "x")


def test_files_that_are_no_vocabulary_are_errors(tmp_path: Path):
    with pytest.raises(EmbeddingError, match=r"cannot read the vocabulary .*x \(No such file.*\): give a file"):
        vocabulary_of(tmp_path / "x")
    (tmp_path / "latin").write_bytes("the\ncafé\n".encode("latin-1"))
    with pytest.raises(EmbeddingError, match=r"latin is not UTF-8 \(byte 7\): convert it"):
        vocabulary_of(tmp_path / "latin")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(EmbeddingError, match=r"x.json is not a tokenizer of the `tokenizers` library .*: give another"):
        vocabulary_of(tmp_path / "x.json")
    with pytest.raises(EmbeddingError, match=r"cannot read the vocabulary .*tokenizer.json"):
        vocabulary_of(tmp_path)


def test_an_iterable_has_a_row_per_word():
    assert vocabulary_of(word for word in ("b", "a", None, "")).words == ["b", "a", None, ""]
    assert vocabulary_of(["a", "<pad>"], "<pad>").padding == 1


def test_a_counter_has_the_counts_of_its_words():
    words = vocabulary_of(Counter({"b": 3, "a": 5}))
    assert (words.words, words.counts.tolist()) == (["b", "a"], [3, 5])


def test_a_dictionary_has_the_rows_of_its_words():
    words = vocabulary_of({"b": 3, "a": 0, "c": 1}, padding="a")
    assert (words.words, words.counts, words.padding) == (["a", "c", None, "b"], None, 0)
    with pytest.raises(EmbeddingError, match=r"2 words needs a different row number .* a list, or a collections"):
        vocabulary_of({"a": 7, "b": 7})
    with pytest.raises(EmbeddingError, match=r"the rows of 2 words go up to 54,321: give a list, or a collections"):
        vocabulary_of({"a": 54_321, "b": 7})
    with pytest.raises(EmbeddingError, match="a set of 2 words has no order for the rows: give a list"):
        vocabulary_of({"a", "b"})
    assert vocabulary_of({"b": 1, "a": 0}.keys()).words == ["b", "a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the words holds 0 words: give at least one"),
        (["a", "b", "a"], "the words has the word 'a' more than once: remove all but one of its rows"),
        (["a", b"b"], r"the words holds b'b', a bytes: give words as str"),
        (Counter({"a": 1, 2: 3}), r"the words holds 2, a int: give words as str"),
    ],
)
def test_words_that_cannot_be_used_are_errors(words: object, message: str):
    with pytest.raises(EmbeddingError, match=message):
        vocabulary_of(words)


def test_padding_must_be_a_word():
    with pytest.raises(
        EmbeddingError, match="'<pad>' is not one of the words of the words: add it, or leave padding out"
    ):
        vocabulary_of(["a"], "<pad>")
    known = Vocabulary(["a", "b"], "mine")
    assert vocabulary_of(known) is known
    assert vocabulary_of(known, "b").padding == 1
    with pytest.raises(EmbeddingError, match="'c' is not one of the words of mine"):
        vocabulary_of(known, "c")


def test_counted_words_have_rows_for_padding_and_for_the_others():
    counts = [("the", 9), ("<unk>", 7), ("a", 3), ("of", 2), ("x", 1)]
    words = of_counts(counts, "texts", None, 2)
    assert words.words == ["<pad>", "<unk>", "the", "a", "of"]
    assert words.counts.tolist() == [0, 0, 9, 3, 2]
    assert (words.padding, words.num_other_tokens, words.name) == (0, 8, "texts")
    few = of_counts(counts, "texts", 1, 1)
    assert (few.words, few.num_other_tokens) == (["<pad>", "<unk>", "the"], 13)
    with pytest.raises(EmbeddingError, match="no word of texts is used 10 times or more: lower --min-count"):
        of_counts(counts, "texts", None, 10)


def test_the_key_is_of_what_a_row_depends_on():
    words = ["a", None, "\ud800"]
    key = Vocabulary(words, "one").key
    assert Vocabulary(words, "other", counts=vocabulary_of(Counter({"a": 1})).counts).key == key
    others = [
        Vocabulary(words, "one", padding=0),
        Vocabulary([None, "a", "\ud800"], "one"),
        Vocabulary(["a", "null", "\ud800"], "one"),
    ]
    assert len({key, *(other.key for other in others)}) == 4


def byte_level(texts: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "<s>"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return backend


def test_tokens_of_bytes_stand_for_the_words_that_they_spell():
    backend = byte_level(["the café the café the naïve 東京 東京"] * 9)
    words = of_tokenizer(backend, "mine")
    ids = backend.get_vocab()
    assert len(words) == len(ids)
    assert {words.words[ids["Ġthe"]], words.words[ids["ĠcafÃ©"]]} == {"the", "café"}
    assert "東京" in words.words
    assert words.words[ids["<pad>"]] is None
    assert words.words[ids["e"]] is None  # occurs inside words
    assert words.words[ids["Ġ"]] is None
    assert words.padding is None
    assert of_tokenizer(backend, "mine", "<pad>").padding == ids["<pad>"]


def test_a_tokenizer_of_transformers_says_its_padding():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(["the cat"]), pad_token="<pad>")
    words = vocabulary_of(tokenizer)
    assert words.padding == tokenizer.pad_token_id
    assert "cat" in words.words or "the" in words.words


def of_words(ids: dict[str, int]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))


def test_pieces_inside_of_words_and_holes_stand_for_no_word(tmp_path: Path):
    backend = of_words({"[UNK]": 0, "play": 1, "##ing": 2, "▁": 5, "Paris": 4})
    backend.add_special_tokens(["[UNK]"])
    assert of_tokenizer(backend, "x").words == [None, "play", None, None, "Paris", "▁"]
    backend.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        read = vocabulary_of(path)
        assert read.words == [None, "play", None, None, "Paris", "▁"]
        assert read.name == str(tmp_path / "tokenizer.json")


def test_words_that_begin_with_the_mark_of_sentencepiece_stand_for_what_is_behind_it():
    assert of_tokenizer(of_words({"[UNK]": 0, "▁the": 1, "s": 2, "▁": 3}), "x").words == [None, "the", None, None]


def test_tokenizers_that_cannot_be_used_are_errors():
    with pytest.raises(EmbeddingError, match="x has 0 tokens: give a trained tokenizer"):
        of_tokenizer(tokenizers.Tokenizer(models.BPE()), "x")
    with pytest.raises(
        EmbeddingError, match=r"'<pad>' is not a token of the tokenizer: name one of its tokens as padding"
    ):
        vocabulary_of(of_words({"[UNK]": 0}), "<pad>")


def test_the_padding_that_a_tokenizer_names_is_its_row(tmp_path: Path):
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=of_words({"[PAD]": 0, "the": 1}), pad_token="[PAD]").save_pretrained(
        tmp_path
    )
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        assert (said_padding(given), vocabulary_of(given).padding) == ("[PAD]", 0)
    backend = of_words({"the": 0, "<p>": 1})
    assert vocabulary_of(backend).padding is None
    backend.enable_padding(pad_id=1, pad_token="<p>")
    assert vocabulary_of(backend).padding == 1


def test_how_a_tokenizer_spells_is_what_it_says_not_what_a_token_looks_like():
    maltese = of_words({"Ġorġ": 0, "the": 1, "##s": 2})
    maltese.decoder = tokenizers.decoders.WordPiece()
    assert vocabulary_of(maltese).words == ["Ġorġ", "the", None]
    maltese.add_tokens(["New York"])
    assert vocabulary_of(maltese).words[3] == "New York"
    spelled = of_words({"Ġcaf": 0, "the": 1, "ĠcafÃ©": 2})
    spelled.decoder = tokenizers.decoders.ByteLevel()
    assert vocabulary_of(spelled).words == ["caf", None, "café"]
