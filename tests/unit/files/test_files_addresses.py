"""Remote files: shown without secrets, inspected, and read completely despite broken connections."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.web_server import Site, serving

from plimsoll.errors import DataError
from plimsoll.files import addresses
from plimsoll.files.addresses import file_name, head, is_remote, look, pieces, shown, without_secrets

pytest.importorskip("aiohttp", reason="http addresses need aiohttp")

CONTENT = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_PAUSES_SECONDS", (0.0,) * 4)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """Return an empty memory:// file system."""
    opened = fsspec.filesystem("memory")
    opened.store.clear()
    opened.pseudo_dirs[:] = [""]
    yield opened
    opened.store.clear()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("s3://a/b", True), ("https://h/a.txt", True), ("memory://a", True), ("hf:imdb", False), ("a/b.txt", False),
        ("C:/a.txt", False), ("/a://b", False),
    ],
)  # fmt: skip
def test_what_is_elsewhere_has_a_protocol(source: str, expected: bool):
    assert is_remote(source) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://me:secret@host/a.txt", "https://me:***@host/a.txt"),
        ("https://me:se@cret@host/a.txt", "https://me:***@host/a.txt"),
        ("https://secret@host/a.txt", "https://***@host/a.txt"),
        ("https://host/a.txt", "https://host/a.txt"),
        ("https://host/a.txt?id=7&X-Amz-Signature=secret", "https://host/a.txt?id=***&X-Amz-Signature=***"),
        ("https://host/a.txt?secret&b=1", "https://host/a.txt?***&b=***"),
        ("zip://a.txt::https://me:secret@host/a.zip?sig=se(cr)et", "zip://a.txt::https://me:***@host/a.zip?sig=***"),
        ("abfs://box@account/a.txt", "abfs://box@account/a.txt"),
        ("s3://bucket/part-?.txt", "s3://bucket/part-?.txt"),
        ("404, url='https://host/a?sig=secret' was not found", "404, url='https://host/a?sig=*** was not found"),
    ],
)  # fmt: skip
def test_secrets_are_not_shown(address: str, expected: str):
    assert shown(address) == expected


def test_secrets_of_a_job_are_not_in_its_record():
    job = {"data": {"train": ["https://me:secret@h/a?b=c", "why?=d"], "validation": 0.1}, "steps": 3}
    assert without_secrets(job) == {
        "data": {"train": ["https://me:***@h/a?b=***", "why?=d"], "validation": 0.1},
        "steps": 3,
    }


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://h/c/a.csv?b=/d.txt", "a.csv"), ("zip://x/a.csv::https://h/c.zip", "a.csv"),
        ("simplecache::https://h/a.csv", "a.csv"), ("s3://b/part-?.csv", "part-?.csv"), ("c/a.csv", "a.csv"),
    ],
)  # fmt: skip
def test_the_name_of_a_file_tells_its_format(address: str, expected: str):
    assert file_name(address) == expected


def test_a_glob_and_a_folder_mean_their_files(memory):
    for name in ("/c/b.txt", "/c/a.txt", "/c/d/e.txt", "/c/a.csv"):
        memory.pipe(name, b"x")
    files, is_named = look("memory://c/*.txt")
    assert ([file.address for file in files], is_named) == (["memory://c/a.txt", "memory://c/b.txt"], False)
    assert len(look("memory://c")[0]) == 4
    (one,), is_named = look("memory://c/a.csv")
    assert (is_named, one.num_bytes) == (True, 1)


@pytest.mark.parametrize("source", ["memory://none.txt", "memory://none/*.txt"])
def test_nothing_found_is_said(memory, source: str):
    with pytest.raises(DataError, match="there is no file at memory://none"):
        look(source)


def test_files_in_an_archive_elsewhere_keep_its_address(tmp_path: Path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.txt", "one")
        archive.writestr("b.txt", "other")
    with serving(Site({"c.zip": content.getvalue()})) as site:
        files, _ = look(f"zip://*.txt::{site.address}/c.zip")
        assert [file.address for file in files] == [f"zip://{name}.txt::{site.address}/c.zip" for name in "ab"]
        assert b"".join(pieces(files[1].address, files[1].num_bytes)) == b"other"
        before = files[1].mark
        site.files["c.zip"] = content.getvalue().replace(b"other", b"0ther")
        with pytest.raises(DataError, match="cannot read zip://b.txt::http.*BadZipFile"):
            list(pieces(files[1].address, 5))
        assert look(f"simplecache::{site.address}/c.zip")[0][0].num_bytes == len(content.getvalue())
        assert before == files[1].mark


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("fault", ["", "cut", "500", "429"])
def test_all_of_a_file_comes_whatever_happens_on_the_way(has_ranges: bool, fault: str):
    content = CONTENT * 1024  # 16 MiB
    with serving(Site({"a.txt": content}, has_ranges, {"a.txt": (fault, 2)} if fault else {})) as site:
        assert b"".join(pieces(f"{site.address}/a.txt?token=1", len(content))) == content
        # The connection is cut twice. With range requests, only the interrupted part is sent again.
        most_share = 1 if fault != "cut" else 1.7 if has_ranges else 2
        assert len(content) <= site.num_sent_bytes <= most_share * len(content)


def test_what_keeps_failing_is_said():
    cut = Site({"a.txt": CONTENT}, has_ranges=False, faults={"a.txt": ("cut", 99)})
    with (
        serving(cut) as site,
        pytest.raises(DataError, match="cannot read http://127.*: 5 tries failed, the last with"),
    ):
        list(pieces(f"{site.address}/a.txt", len(CONTENT)))
    with pytest.raises(DataError, match="5 tries failed, the last with ClientCo"):  # the server has stopped
        look(f"{site.address}/a.txt")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("403", r"cannot be read without permission \(403 Forbidden\): give fsspec credentials"),
        ("401", r"cannot be read without permission \(401 Unauthorized\): give fsspec credentials"),
        ("410", "there is no file at"),
        ("503", "5 tries failed, the last with ClientResponseError .503 Service Unavailable"),
        ("400", "one try failed, the last with ClientResponseError .400 Bad Request"),
    ],
)  # fmt: skip
def test_what_a_server_answers_is_said_and_its_secrets_are_not(status: str, words: str):
    with serving(Site({"a.txt": b"x"}, faults={"a.txt!": (status, 99)})) as site:
        address = site.address.replace("http://", "http://me:secret@")
        for work in (look, lambda source: list(pieces(source, 1)), lambda source: head(source, 1)):
            with pytest.raises(DataError, match=words) as raised:
                work(f"{address}/a.txt?sig=secret")
            assert "secret" not in str(raised.value)


def test_a_server_that_is_back_soon_is_asked_again():
    with serving(Site({"a.txt": b"x"}, faults={"a.txt!": ("503", 6)})) as site:  # a HEAD and a GET request per try
        assert look(f"{site.address}/a.txt")[0][0].num_bytes == 1


@pytest.mark.parametrize("name", ["none.txt", "*.txt"])
def test_a_web_server_cannot_list(name: str):
    with serving(Site({})) as site, pytest.raises(DataError, match="there is no file at http") as raised:
        look(f"{site.address}/{name}")
    assert ("cannot list, so give each file" in str(raised.value)) == ("*" in name)


def test_a_web_page_in_place_of_a_text_is_refused():
    with serving(
        Site({"a.txt": b"<html>", "a.html": b"x"}, headers={"Content-Type": "text/html; charset=utf-8"})
    ) as site:
        with pytest.raises(DataError, match="is a web page, not a text file"):
            look(f"{site.address}/a.txt?b=c.html")
        assert look(f"{site.address}/a.html")[0][0].num_bytes == 1


def test_redirects_are_followed():
    with serving(Site({"b.txt": CONTENT}, moved={"a.txt": "b.txt"})) as site:
        (file,), _ = look(f"{site.address}/a.txt")
        assert b"".join(pieces(file.address, file.num_bytes)) == CONTENT


def test_a_server_that_only_sends_compressed_is_refused():
    with serving(Site({"a.txt": b"x"}, headers={"Content-Encoding": "gzip"})) as site:
        with pytest.raises(DataError, match="does not send the size of"):
            look(f"{site.address}/a.txt")
        with pytest.raises(DataError, match="only compressed: download it"):
            list(pieces(f"{site.address}/a.txt", 1))


def test_a_file_that_has_grown_is_refused():
    grown = Site({"a.txt": CONTENT}, has_ranges=False)
    with serving(grown) as site, pytest.raises(DataError, match="is larger than the 100 bytes"):
        list(pieces(f"{site.address}/a.txt", 100))


def test_a_time_alone_tells_a_change():
    headers = {"Last-Modified": "Wed, 25 Nov 2026 00:00:00 GMT"}
    with serving(Site({"a.txt": b"x"}, headers=headers, says_state=False)) as site:
        (before,), _ = look(f"{site.address}/a.txt")
        headers["Last-Modified"] = "Wed, 25 Nov 2026 00:00:01 GMT"
        (after,), _ = look(f"{site.address}/a.txt")
        assert before.mark != after.mark


@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_begin_of_a_file_is_read_alone(has_ranges: bool):
    with serving(Site({"a.txt": CONTENT}, has_ranges)) as site:
        assert head(f"{site.address}/a.txt", 300) == CONTENT[:300]


@pytest.mark.parametrize(
    ("source", "words"),
    [("nothing://a/b.txt", "has an unknown protocol"), ("s3://bucket/a.txt", "pip install fsspec s3fs")],
)
def test_protocols_that_are_not_to_be_had_say_what_to_install(source: str, words: str):
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(DataError, match=words):
            look(source)
    else:
        pytest.skip("s3fs is installed, so its protocol is known")
