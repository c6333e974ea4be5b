"""Files of object stores and web servers by their addresses: looked at, and read again where a connection breaks.

`look` says which files an address means, how large each is, and a mark of its state; `pieces` yields a file from begin
to end. Addresses are shown without their secrets.

Does NOT cover writing; servers that do not say how large a file is, or that send it compressed only; and lists of web
servers: each file is given. A server that says neither ETag nor time can change a file unnoticed if its size stays.

Source: https://filesystem-spec.readthedocs.io
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import xxhash

from plimsoll.errors import DataError

T = TypeVar("T")

PIECE_BYTES = 8 << 20
_TRIES = 5  # in a row without a byte
_PAUSES_SECONDS = (0.2, 1.0, 3.0, 8.0)
_SILENT_SECONDS = 60  # after which a server has failed one try; how long a whole file takes does not matter
# Of the state of a file, by the names that file systems of fsspec have for it, in small letters.
_SAID = (
    *("size", "etag", "lastmodified", "last-modified", "last_modified", "mtime", "created", "updated", "generation"),
    *("md5hash", "content-md5", "digest", "crc", "date_time"),
)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)([^/:\s]*):[^/\s]*@")
_TOKEN = re.compile(r"(https?://)[^/@:\s]+@", re.IGNORECASE)
_QUERY = re.compile(r"(https?://[^\s?]*\?)(\S+)", re.IGNORECASE)
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs",
             "az": "adlfs", "http": "aiohttp", "https": "aiohttp", "hdfs": "pyarrow", "sftp": "paramiko"}  # fmt: skip
_WEB = ("http", "https")
_GONE, _FORBIDDEN, _MAY_PASS = (404, 410), (401, 403, 407), (408, 425, 429)
# What stores raise that is no OSError; looked up where the package has been loaded.
_RAISED = {
    "aiohttp": ("ClientError",),
    "azure.core.exceptions": ("AzureError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "paramiko.ssh_exception": ("SSHException",),
    "tarfile": ("TarError",),
    "zipfile": ("BadZipFile",),
}


class Seen(NamedTuple):
    """A file elsewhere; ``mark`` tells its state from another, as far as the store says."""

    address: str
    num_bytes: int
    mark: str


def is_remote(source: str) -> bool:
    """Whether a source has a protocol, and is not of this machine's files."""
    return _ADDRESS.match(source) is not None and not source.lower().startswith("hf:")


def shown(text: str) -> str:
    """Return an address, or a text with addresses in it, without secrets.

    They are passwords and, of web servers, a name alone before the host and the values in a query (``?sig=***``).
    """
    without = _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", text))
    return _QUERY.sub(lambda found: found[1] + "&".join(map(_shown_part, found[2].split("&"))), without)


def _shown_part(part: str) -> str:
    name, has_value, _ = part.partition("=")
    return f"{name}=***" if has_value else "***"


def without_secrets(value: T) -> T:
    """Return a JSON value, in which all addresses are as `shown`."""
    changed: Any = value
    if isinstance(value, str):
        changed = shown(value) if is_remote(value) else value
    elif isinstance(value, dict):
        changed = {name: without_secrets(one) for name, one in value.items()}
    elif isinstance(value, list | tuple):
        changed = type(value)(without_secrets(one) for one in value)
    result: T = changed
    return result


def file_name(address: str) -> str:
    """Return what the file of an address is called, by which its format is told."""
    path = next((part for part in address.split("::") if "://" in part), address)
    if path.lower().startswith(_WEB):
        path = path.partition("?")[0].partition("#")[0]
    return path.rstrip("/").rpartition("/")[2]


def look(source: str) -> tuple[list[Seen], bool]:
    """Return the files that an address means, and whether it is the address of just one.

    Args:
        source: of a file, a folder (all below it) or with ``*`` and ``**``, where the store can list.

    Raises:
        DataError: if there is no file, the store cannot be reached, or a package is missing that knows the protocol.
    """
    path, infos = _tried(lambda: _listed(source), source)
    if not infos:
        raise _not_there(source)
    is_named = len(infos) == 1 and infos[0]["name"].rstrip("/") == path.rstrip("/")
    if is_named:
        return [_seen(infos[0], source)], True
    return [_seen(info, _address_of(str(info["name"]), source)) for info in infos], False


def pieces(address: str, num_bytes: int) -> Iterator[bytes]:
    """Yield a file of that size from its begin, at most 8 MiB at a time.

    Raises:
        DataError: if it cannot be read, or has more bytes.
    """
    tries, done = _Tries(address), 0
    while done < num_bytes:
        try:
            for piece in _read(address, done, num_bytes):
                done += len(piece)
                if done > num_bytes:
                    raise DataError(
                        f"{shown(address)} came with more than the {num_bytes:,} bytes that its store says: try again, "
                        "or download it"
                    )
                tries.succeeded()
                yield piece
            if done < num_bytes:
                raise ConnectionError(f"{done:,} bytes of {num_bytes:,} came")
        except _errors() as error:
            tries.failed(error)


def head(address: str, num_bytes: int) -> bytes:
    """Return the first bytes of a file, which has as many or fewer, without reading much more."""
    return _tried(lambda: _head(address, num_bytes), address)


# -- asking a store ----------------------------------------------------------------------------------------------------


def _opened(source: str) -> tuple[Any, str]:
    """The file system of an address and the path in it."""
    protocols = [part.partition("://")[0].lower() for part in source.split("::")]
    try:
        from fsspec.core import url_to_fs

        opened, path = url_to_fs(source, **_options(protocols))
    except ImportError as error:
        package = next((_PACKAGES[one] for one in protocols if one in _PACKAGES), "fsspec")
        raise DataError(
            f"{shown(source)} needs {package} ({error}): install it with pip install fsspec {package}"
        ) from None
    except ValueError as error:
        raise DataError(
            f"{shown(source)} is of no known protocol ({shown(str(error))}): give for example s3:// or https://"
        ) from None
    return opened, str(path)


def _options(protocols: list[str]) -> dict[str, Any]:
    """No file system that remembers lists, and of the web no limit on how long a whole file takes (300 s otherwise)."""
    options: dict[str, Any] = {} if protocols[0] == "memory" else {"skip_instance_cache": True}
    for protocol in set(protocols) & set(_WEB):
        import aiohttp
        from fsspec.config import conf

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
        own = conf.get(protocol, {}).get("client_kwargs", {})
        options[protocol] = {"client_kwargs": {"timeout": timeout, **own}}
    return options


def _is_web(opened: Any) -> bool:
    protocols = opened.protocol if isinstance(opened.protocol, tuple) else (opened.protocol,)
    return "http" in protocols


def _listed(source: str) -> tuple[str, list[dict[str, Any]]]:
    """The path in its store, and what that says of each file there."""
    opened, path = _opened(source)
    if any(sign in path for sign in "*?[") and not _is_web(opened):
        return path, _infos(opened, opened.glob(path))
    info = opened.info(path)
    if info["type"] != "directory":
        return path, [info]
    return path, _infos(opened, opened.find(path))


def _infos(opened: Any, names: list[str]) -> list[dict[str, Any]]:
    """What the store says of each file by itself, which may be more than a listing says."""
    return [info for info in map(opened.info, sorted(names)) if info["type"] == "file"]


def _address_of(name: str, source: str) -> str:
    """The address of a file that was found at another, in the same archive if that has one."""
    first, chain, rest = source.partition("::")
    protocol, has_path, _ = first.partition("://")
    if not has_path:  # a cache in front of a store: `simplecache::s3://bucket`
        return f"{first}::{_address_of(name, rest)}"
    if "://" in name:
        return name
    return f"{protocol}://{name if protocol == 'file' else name.lstrip('/')}{chain}{rest}"


def _seen(info: dict[str, Any], address: str) -> Seen:
    if info.get("size") is None:
        raise DataError(f"{shown(address)} does not say how large it is: download it, and give the file")
    # A web page where text is expected is mostly a login or a list of files.
    if info.get("mimetype") == "text/html" and not file_name(address).lower().endswith((".html", ".htm")):
        raise DataError(
            f"{shown(address)} is a web page, not a file of text: give each file, for web servers cannot list, and "
            "credentials if the page asks for a login"
        )
    said = {str(name).lower(): value for name, value in info.items()}
    mark = xxhash.xxh3_64_hexdigest("\0".join(str(said.get(name)) for name in _SAID).encode())
    return Seen(address, int(info["size"]), mark)


def _read(address: str, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a range, or fewer if the connection ends."""
    opened, path = _opened(address)
    if _is_web(opened):
        yield from _read_web(opened, path, begin, end)
        return
    for first in range(begin, end, PIECE_BYTES):
        last = min(first + PIECE_BYTES, end)
        piece: bytes = opened.cat_file(path, start=first, end=last)
        yield piece
        if len(piece) < last - first:
            return


def _read_web(opened: Any, path: str, begin: int, end: int) -> Iterator[bytes]:
    """One request for all of it: the server may not be able to send parts, and says so by sending the whole."""
    headers = {**opened.kwargs.get("headers", {}), "Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
    with opened.open(path, "rb", block_size=0, size=end, headers=headers) as source:
        answered = source.r.headers
        if answered.get("Content-Encoding", "identity") != "identity":
            raise DataError(f"{shown(path)} is only sent compressed: download it, and give the file")
        is_part = answered.get("Content-Range", "").startswith(f"bytes {begin}-")
        left_out = 0 if is_part else begin
        while piece := source.read(PIECE_BYTES):
            kept = piece[left_out:]
            left_out = max(left_out - len(piece), 0)
            if kept:
                yield kept


def _head(address: str, num_bytes: int) -> bytes:
    parts, have = [], 0
    for piece in _read(address, 0, num_bytes):
        parts.append(piece)
        have += len(piece)
        if have >= num_bytes:
            break
    return b"".join(parts)[:num_bytes]


# -- trying again ------------------------------------------------------------------------------------------------------


class _Tries:
    """Waits and counts where reading fails; raises what another try does not change."""

    def __init__(self, address: str) -> None:
        self._address, self._num_failures = address, 0

    def succeeded(self) -> None:
        """Some bytes came: begin to count anew."""
        self._num_failures = 0

    def failed(self, error: Exception) -> None:
        """Wait before the next try.

        Raises:
            DataError: if there is none.
        """
        cause = _cause_of(error)
        status = getattr(cause, "status", None)
        if status in _GONE or isinstance(cause, FileNotFoundError):
            raise _not_there(self._address) from None
        if status in _FORBIDDEN or isinstance(cause, PermissionError) or _has_no_credentials(cause):
            raise DataError(
                f"{shown(self._address)} may not be read ({_said(cause)}): give fsspec credentials for it, or check "
                "whether a signed address is still valid"
            ) from None
        self._num_failures += 1
        is_final = isinstance(status, int) and status < 500 and status not in _MAY_PASS
        if is_final or self._num_failures == _TRIES:
            tries = "a try" if is_final else f"{_TRIES} tries"
            raise DataError(
                f"cannot read {shown(self._address)}: {tries} failed, the last with {type(cause).__name__} "
                f"({_said(cause)}): check the network and the store, and start again"
            ) from None
        time.sleep(_PAUSES_SECONDS[self._num_failures - 1])


def _tried(work: Callable[[], T], address: str) -> T:
    """Do something over a network, again where it fails and may not the next time."""
    tries = _Tries(address)
    while True:
        try:
            return work()
        except _errors() as error:
            tries.failed(error)


def _errors() -> tuple[type[Exception], ...]:
    """What reading from a store fails with: of the system, and of what is loaded of the stores' packages."""
    errors: list[type[Exception]] = [OSError, TimeoutError, EOFError]
    for module, names in _RAISED.items():
        with suppress(KeyError):
            errors += [getattr(sys.modules[module], name) for name in names]
    return tuple(errors)


def _cause_of(error: BaseException) -> BaseException:
    """Why a web server gave no file: fsspec calls a refused connection, too, a file that is not there."""
    cause = error.__cause__
    is_of_web = isinstance(cause, TimeoutError | ConnectionError) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and cause is not None and is_of_web else error


def _has_no_credentials(error: BaseException) -> bool:
    return type(error).__name__ in {"NoCredentialsError", "DefaultCredentialsError"}  # of botocore and google.auth


def _said(error: BaseException) -> str:
    status = getattr(error, "status", None)
    text = f"{status} {getattr(error, 'message', '')}" if status is not None else str(error)
    return shown(" ".join(islice(text.split(), 40)))[:200]


def _not_there(source: str) -> DataError:
    lists = "; a web server cannot list, so give each file" if source.startswith(_WEB) and "*" in source else ""
    return DataError(f"there is no file at {shown(source)}: check the address, and that it may be read{lists}")
