"""Files of object stores and web servers, as local copies in a folder of bounded size.

A source with a protocol (``s3://bucket/part-*.jsonl``, ``https://host/a.txt``, ``memory://a.txt``) is opened by fsspec:
`find` lists what it means, and gives each file a place in a folder. The copy is made when somebody opens the place
(`present`), and may go again: where copies would take more than the folder may hold, those go that were used longest
ago. A process that has one open reads on. Beside each place stays a note of where it is from.

A copy is whole or not there: it is written to a temporary name, in pieces of 8 MiB where the server can do that, each
tried five times, and renamed. It has a time that is made of what the store says of the file (size, ETag, time), so a
file that changed there is another file, for an index as for a checkpoint; and one that changed while it was copied, or
between two copies, is refused.

``PLIMSOLL_COPIES`` sets how much the folder may hold (20GiB). Credentials are fsspec's own affair: in its environment
variables or configuration. A password in an address is not shown, and in the note only its owner can read it.

Does NOT cover writing, and servers that do not say how large a file is. HTTP cannot list: give each file.

Source: https://filesystem-spec.readthedocs.io
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from plimsoll.errors import DataError, OutputError
from plimsoll.records.base import write_atomically
from plimsoll.records.units import format_bytes, parse_bytes

T = TypeVar("T")

_LIMIT, _DEFAULT_LIMIT = "PLIMSOLL_COPIES", "20GiB"
_NOTE = ".from.json"
_PIECE_BYTES = 8 << 20
_TRIES = 5
# Of the state of a file, by the names that file systems of fsspec have for it.
_SAID = (
    *("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "created", "updated"),
    *("md5Hash", "content-md5"),
)
_PAUSES_SECONDS = (0.2, 0.5, 1.0, 2.0)
_SECRET = re.compile(r"(?<=://)([^/@:]*):[^/@]*@")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "http": "aiohttp",
             "https": "aiohttp", "hdfs": "pyarrow", "sftp": "paramiko"}  # fmt: skip


class RemoteFile(NamedTuple):
    """A file elsewhere: where its copy is, or will be, and what tells its state from another."""

    path: str
    num_bytes: int
    mtime_ns: int
    is_named: bool


def is_remote(source: str) -> bool:
    """Whether a source has a protocol, and is not of this machine's files."""
    return _ADDRESS.match(source) is not None and not source.lower().startswith("hf:")


def shown(address: str) -> str:
    """Return an address without its password."""
    return _SECRET.sub(r"\1:***@", address)


def name_of(path: str) -> str:
    """Return what the user calls a file: the address of a copy, without its password."""
    note = _note_of(path)
    return path if note is None else shown(note["address"])


def find(source: str, folder: Path | None) -> list[RemoteFile]:
    """Return the files that an address means: itself, all below it, or those that match it.

    Args:
        source: an address; ``*`` and ``**`` work where the store can list.
        folder: where copies go; ``None``: places are the addresses, for who does not read.

    Raises:
        DataError: if there is no file, the store cannot be reached, or a package is missing that knows the protocol.
    """
    opened, path = _opened(source)
    infos, is_named = _tried(lambda: _listed(opened, path), source), True
    if infos is None or len(infos) != 1 or infos[0]["name"].rstrip("/") != path.rstrip("/"):
        is_named = False
    if not infos:
        raise DataError(f"there is no file at {shown(source)}: check the address, and that it may be read")
    if is_named:
        return [_file(infos[0], source, folder, is_named)]
    protocol = source.partition("://")[0]
    return [_file(info, _address_of(info, protocol), folder, is_named) for info in infos]


def present(path: str) -> str:
    """Return a path where its file is, copied now if it was not or has gone.

    Raises:
        DataError: if the file cannot be copied, or is not what it was.
        OutputError: if the folder cannot hold it.
    """
    if not os.path.exists(path) and (note := _note_of(path)) is not None:
        _copy(Path(path), note)
    elif _folder_of(path) is not None:
        with suppress(OSError):  # used now
            os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
    return path


def is_copy(path: str) -> bool:
    """Whether a path is the place of a copy, there or not."""
    return os.path.exists(path + _NOTE)


# -- what is there ---------------------------------------------------------------------------------------------------


def _opened(source: str) -> tuple[Any, str]:
    protocol = source.partition("://")[0].partition("::")[0].lower()
    try:
        from fsspec.core import url_to_fs

        opened, path = url_to_fs(source, **({"skip_instance_cache": True} if protocol != "memory" else {}))
    except ImportError as error:
        package = _PACKAGES.get(protocol, "fsspec")
        raise DataError(
            f"{shown(source)} needs {package} ({error}): install it with pip install fsspec {package}"
        ) from None
    except ValueError as error:
        raise DataError(
            f"{shown(source)} is of no known protocol ({error}): give for example s3:// or https://"
        ) from None
    return opened, str(path)


def _listed(opened: Any, path: str) -> list[dict[str, Any]] | None:
    """What the store says of the files at an address, or ``None`` if there is none."""
    if any(sign in path for sign in "*?[") and not _is_web(opened):
        return _infos(opened, opened.glob(path))
    try:
        info = opened.info(path)
    except FileNotFoundError:
        return None
    if info["type"] != "directory":
        return [info]
    return _infos(opened, opened.find(path))


def _infos(opened: Any, names: list[str]) -> list[dict[str, Any]]:
    """What the store says of each file by itself, which may be more than a listing says."""
    return [info for info in map(opened.info, sorted(names)) if info["type"] == "file"]


def _is_web(opened: Any) -> bool:
    protocols = opened.protocol if isinstance(opened.protocol, tuple) else (opened.protocol,)
    return "http" in protocols


def _address_of(info: dict[str, Any], protocol: str) -> str:
    name = str(info["name"])
    return name if "://" in name else f"{protocol}://{name if protocol == 'file' else name.lstrip('/')}"


def _file(info: dict[str, Any], address: str, folder: Path | None, is_named: bool) -> RemoteFile:
    if info.get("size") is None:
        raise DataError(f"{shown(address)} does not say how large it is: download it, and give the file")
    mark = _mark(info)
    mtime_ns = int(mark, 16) % (1 << 31) * 10**9  # whole seconds, which any file system keeps; it is no time
    if folder is None:
        return RemoteFile(address, int(info["size"]), mtime_ns, is_named)
    own = folder / xxhash.xxh3_128_hexdigest(address.encode())[:16]
    place = own / (address.partition("?")[0].rstrip("/").rpartition("/")[2] or "file")
    own.mkdir(parents=True, exist_ok=True)
    note = {"address": address, "num_bytes": int(info["size"]), "mark": mark, "mtime_ns": mtime_ns}
    known = _note_of(str(place))
    if known != note:
        with suppress(FileNotFoundError):
            place.unlink()
        write_atomically(Path(str(place) + _NOTE), json.dumps(note).encode())
        os.chmod(str(place) + _NOTE, 0o600)
    return RemoteFile(str(place), int(info["size"]), mtime_ns, is_named)


def _mark(info: dict[str, Any]) -> str:
    """What tells one state of a file from another, as far as its store says."""
    said = [str(info.get(name)) for name in _SAID]
    return xxhash.xxh3_64_hexdigest("\0".join(said).encode())


def _note_of(path: str) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = json.loads(Path(path + _NOTE).read_bytes())
    except (OSError, ValueError):
        return None
    return note


def _folder_of(path: str) -> Path | None:
    """The folder of copies that a path is in."""
    return Path(path).parents[1] if is_copy(path) else None


# -- copying -----------------------------------------------------------------------------------------------------------


def _copy(place: Path, note: dict[str, Any]) -> None:
    """Make a copy; another process may be making the same, and is waited for."""
    with _locked(place.with_name(place.name + ".lock")):
        if place.exists():
            return
        _make_room(place.parents[1], note["num_bytes"], shown(note["address"]))
        opened, path = _opened(note["address"])
        _require_same(opened, path, note)
        temporary = place.with_name(f".{place.name}.tmp-{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                _download(opened, path, note, file)
                file.flush()
                os.fsync(file.fileno())
            _require_same(opened, path, note)
            os.utime(temporary, ns=(time.time_ns(), note["mtime_ns"]))
            temporary.rename(place)
        except OSError as error:
            raise OutputError(
                f"cannot write {place}: {error.strerror}; free some space, or give another --cache"
            ) from None
        finally:
            with suppress(OSError):
                temporary.unlink()


def _require_same(opened: Any, path: str, note: dict[str, Any]) -> None:
    with suppress(AttributeError):
        opened.invalidate_cache()
    infos = _tried(lambda: _listed(opened, path), note["address"])
    if not infos or _mark(infos[0]) != note["mark"]:
        what = "is gone" if not infos else "has changed"
        raise DataError(
            f"{shown(note['address'])} {what} since it was first looked at: put it back, or start anew in another --out"
        )


def _download(opened: Any, path: str, note: dict[str, Any], file: Any) -> None:
    total, address = note["num_bytes"], note["address"]
    if _is_web(opened) and not opened.info(path).get("partial"):
        _tried(lambda: _stream(opened, path, file), address)
    else:
        for begin in range(0, total, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, total)
            piece = _tried(lambda: _piece(opened, path, begin, end), address)  # noqa: B023 -- done before the next
            file.write(piece)
    if file.tell() != total:
        raise DataError(
            f"{shown(address)} came with {file.tell():,} bytes, and its store says {total:,}: try again, or download it"
        )


def _piece(opened: Any, path: str, begin: int, end: int) -> bytes:
    piece: bytes = opened.cat_file(path, start=begin, end=end)
    if len(piece) != end - begin:
        raise ConnectionError(f"{len(piece)} bytes of {end - begin} came")
    return piece


def _stream(opened: Any, path: str, file: Any) -> None:
    """From the begin in one go, where a server cannot send parts."""
    file.seek(0)
    file.truncate()
    with opened.open(path, "rb", block_size=0) as source:
        while piece := source.read(_PIECE_BYTES):
            file.write(piece)


def _tried(work: Callable[[], T], address: str) -> T:
    """Do something over a network, again where it fails and may not the next time."""
    last: Exception | None = None
    for pause_seconds in (0.0, *_PAUSES_SECONDS):
        time.sleep(pause_seconds)
        try:
            return work()
        except FileNotFoundError:
            raise DataError(
                f"there is no file at {shown(address)}: check the address, and that it may be read"
            ) from None
        except PermissionError as error:
            raise DataError(
                f"{shown(address)} may not be read ({shown(str(error))}): give fsspec credentials for it"
            ) from None
        except _network_errors() as error:
            last = error
    raise DataError(
        f"cannot read {shown(address)}: {_TRIES} tries failed, the last with {type(last).__name__} "
        f"({shown(str(last))[:200]}): check the network and the store, and start again"
    )


def _network_errors() -> tuple[type[Exception], ...]:
    errors: list[type[Exception]] = [OSError, TimeoutError, EOFError]
    with suppress(ImportError):
        import aiohttp

        errors.append(aiohttp.ClientError)
    return tuple(errors)


def _make_room(folder: Path, num_bytes: int, name: str) -> None:
    """Let the copies go that were used longest ago, until so much more may be there."""
    text = os.environ.get(_LIMIT, _DEFAULT_LIMIT)
    most_bytes = parse_bytes(text)
    if num_bytes > most_bytes:
        raise OutputError(
            f"{name} has {format_bytes(num_bytes)}, copies may take {format_bytes(most_bytes)}: set {_LIMIT} to more"
        )
    with _locked(folder / ".lock"):
        copies = []
        for note in folder.glob(f"*/*{_NOTE}"):
            place = Path(str(note).removesuffix(_NOTE))
            with suppress(FileNotFoundError):
                status = place.stat()
                copies.append((status.st_atime_ns, status.st_size, place))
        taken_bytes = sum(size for _, size, _ in copies)
        for _, size, place in sorted(copies):
            if taken_bytes + num_bytes <= most_bytes:
                return
            with suppress(FileNotFoundError):
                place.unlink()
            taken_bytes -= size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise OutputError(f"cannot write {path.parent}: {error.strerror}; allow it, or give another --cache") from None
