"""`plimsoll embeddings`: its output, the files it writes, its refusals, and the files that it leaves unchanged."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

GLOVE = "the 0.1 0.2\ncat 1e-1 -2\nDog 3 4\nof 5 6\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "cache"))
    Path("glove.txt").write_text(GLOVE)
    Path("words.txt").write_text("the\nCat\ndog\nbird\n")
    return tmp_path


def test_the_vectors_of_a_vocabulary_are_taken_and_what_was_found_is_said(call, folder):
    done = call("embeddings", "subset", "glove.txt", "--vocabulary", "words.txt", "--missing", "mean", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert (found["record"], found["num_words"], found["num_exact"]) == ("embedding-subset", 4, 1)
    assert (found["num_lower"], found["num_capitalised"], found["misses"]) == (1, 1, [["bird", -1]])
    tables = call("embeddings", "subset", "glove.txt", "--vocabulary", "words.txt", "--missing", "mean")
    assert "3 (75.0%) of the words: 1 as written, 1 in lower case, 1" in tables.out


def test_the_output_is_of_the_format_of_its_name_and_is_not_overwritten(call, folder):
    take = ("embeddings", "subset", "glove.txt", "--vocabulary", "words.txt", "-o")
    for name in ("rows.txt", "rows.vec", "rows.bin", "rows.safetensors"):
        done = call(*take, name)
        assert (done.code, done.out) == (0, f"{name}\n")
        assert "3 (75.0%) of the words" in done.err
    assert Path("rows.txt").read_text() == "the 0.1 0.2\nCat 0.1 -2.0\ndog 3.0 4.0\n"
    assert Path("rows.vec").read_text().startswith("3 2\nthe 0.1 0.2\n")
    again = call(*take, "rows.txt")
    assert (again.code, "rows.txt exists already and is not overwritten" in again.err) == (2, True)
    array = call(*take, "rows.npy", "--missing", "zeros")  # its words would be written to rows.txt
    assert (array.code, "rows.txt exists already" in array.err) == (2, True)
    assert not Path("rows.npy").exists()
    assert call(*take, "rows.npy", "--missing", "zeros", "--force").code == 0
    assert np.load("rows.npy").tolist() == np.array([[0.1, 0.2], [0.1, -2], [3, 4], [0, 0]], np.float32).tolist()
    assert Path("rows.txt").read_text() == "the\nCat\ndog\nbird\n"
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith((".", "rows.npy"))) == ["rows.npy"]


def test_an_array_does_not_replace_what_it_is_made_of(call, folder):
    done = call("embeddings", "convert", "glove.txt", "-o", "glove.npy", "--force")
    assert (done.code, "which is an input: give another -o" in done.err) == (2, True)
    done = call("embeddings", "subset", "glove.txt", "--vocabulary", "words.txt", "-o", "words.npy", "--force")
    assert done.code == 2
    assert Path("glove.txt").read_text() == GLOVE


def test_what_is_wrong_is_also_said_where_there_is_an_output(call, folder):
    Path("bad.txt").write_text("a 1 2\nb 1\na 3 4\nc nan 1\n")
    done = call("embeddings", "convert", "bad.txt", "-o", "good.vec")
    assert done.code == 0
    assert all(said in done.err for said in ("wrong dimension", "line 2: 'b 1', 1 numbers, not 2", "duplicate", "NaN"))
    Path("twice.txt").write_text("a 1 2\na 3 4\n")
    strict = call("embeddings", "info", "twice.txt", "--strict")
    assert (strict.code, "'a' occurs more than once: remove all but one" in strict.err) == (2, True)


def test_words_are_counted_in_texts_and_in_a_column_of_them(call, folder):
    Path("text.txt").write_text("the cat of the dog of the bird\n")
    done = call(
        "embeddings", "subset", "glove.txt", "--corpus", "text.txt", "--min-count", "2", "--json", "--exact-case"
    )
    found = json.loads(done.out)
    assert (found["num_rows"], found["num_words"], found["num_exact"]) == (4, 3, 2)  # rows: padding; unknown, the, of
    # 3 times "the" and 2 times "of"; cat, dog and bird have no row
    assert (found["num_tokens"], found["num_hit_tokens"]) == (8, 5)
    Path("table.csv").write_text("title,body\nthe,cat cat\nof,cat dog\n")
    done = call("embeddings", "subset", "glove.txt", "--corpus", "table.csv", "--set", "data.text=body", "--json")
    found = json.loads(done.out)
    assert (found["num_tokens"], found["num_exact"], found["num_capitalised"]) == (4, 1, 1)


def test_a_tokenizer_gives_a_row_per_id(call, folder):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<|endoftext|>": 0, "cat": 2, "##s": 1}, "cat")).save("tokenizer.json")
    done = call("embeddings", "subset", "glove.txt", "--tokenizer", "tokenizer.json", "--missing", "zeros", "--json")
    found = json.loads(done.out)
    assert (found["num_rows"], found["num_exact"]) == (3, 1)


def test_a_file_is_looked_at_and_converted(call, folder):
    done = call("embeddings", "info", "glove.txt")
    assert (done.code, "GloVe text" in done.out, "'the', 'cat', 'Dog', 'of'" in done.out) == (0, True, True)
    done = call("embeddings", "convert", "glove.txt", "-o", "all.safetensors", "--precision", "float16", "--json")
    assert json.loads(done.out)["num_words"] == 4
    assert json.loads(call("embeddings", "info", "all.safetensors", "--json").out)["num_words"] == 4


def test_one_file_of_an_archive_is_named(call, folder):
    with zipfile.ZipFile("glove.zip", "w") as archive:
        archive.write("glove.txt")
        archive.write("words.txt")
    done = call("embeddings", "info", "glove.zip")
    assert done.code == 2
    assert "glove.zip holds 2 files (glove.txt, words.txt): name one as glove.zip/glove.txt\n" in done.err
    assert call("embeddings", "info", "glove.zip/glove.txt").code == 0


BAD = {
    "no file": (("info", "none.txt"), "there is no file none.txt"),
    "a folder": (("info", "."), ". is a folder: name the file with the vectors in it"),
    "no vectors": (("info", "words.txt"), "words.txt is not in a known format of word vectors (it begins with b'the"),
    "nothing in it": (("info", "empty.txt"), "empty.txt holds 0 bytes"),
    "no words": (
        ("subset", "glove.txt"),
        "the words must come from one option, not 0 (none): give one of --vocabulary",
    ),
    "words twice": (
        ("subset", "glove.txt", "--vocabulary", "words.txt", "--corpus", "words.txt"),
        "the words must come from one option, not 2 (--vocabulary, --corpus)",
    ),
    "no such words": (("subset", "glove.txt", "--vocabulary", "none"), "cannot read the vocabulary none (No such file"),
    "no hit": (
        ("subset", "glove.txt", "--vocabulary", "other.txt"),
        "none of the 2 words of other.txt (xyzzy, plugh, ...) is in glove.txt (the, cat, Dog, of, ...)",
    ),
    "no format": (("convert", "glove.txt", "-o", "out.doc"), "cannot write out.doc: its suffix is unknown"),
    "no folder": (("convert", "glove.txt", "-o", "none/out.txt"), "there is no folder none: make it"),
    "not for words of this text": (
        ("subset", "glove.txt", "--vocabulary", "words.txt", "--padding", "<pad>"),
        "'<pad>' is not one of the words of words.txt: add it, or leave padding out",
    ),
    "strict": (
        ("info", "short.txt", "--strict"),
        "short.txt: line 2: 'b 1', 1 numbers, not 2 (wrong dimension): correct the file, or leave out --strict",
    ),
    "of a corpus": (
        ("subset", "glove.txt", "--vocabulary", "words.txt", "--min-count", "2"),
        "--min-count needs --corpus: leave it out, or give --corpus too",
    ),
    "below a file": (("info", "glove.txt/inside.txt"), "glove.txt is not a zip archive, so it has no inside.txt"),
    "a pipe": (("info", "pipe"), "pipe is not a regular file, so it cannot be read twice: write it to a disk"),
    "too rare": (
        ("subset", "glove.txt", "--corpus", "words.txt", "--min-count", "9"),
        "no word of words.txt is used 9 times or more: lower --min-count",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_said_with_what_to_do(call, folder, name):
    Path("empty.txt").touch()
    os.mkfifo("pipe")
    Path("other.txt").write_text("xyzzy\nplugh\n")
    Path("short.txt").write_text("a 1 2\nb 1\nc 1 2\n")
    arguments, message = BAD[name]
    done = call("embeddings", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err, done.err
    as_json = call("embeddings", *arguments, "--json")
    assert json.loads(as_json.out)["exit_code"] == 2


def test_a_result_that_cannot_be_written_leaves_nothing(call, folder):
    if os.geteuid() == 0:
        pytest.skip("root may write into any folder")
    Path("locked").mkdir(mode=0o500)
    done = call("embeddings", "convert", "glove.txt", "-o", "locked/out.txt")
    assert (done.code, "cannot write locked/out.txt: Permission denied" in done.err) == (2, True)
