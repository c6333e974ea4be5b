"""Reader for files of object stores and web servers, by address. It reconnects if a connection breaks.

`look` resolves an address to files, each with its size and a fingerprint of its version; `pieces` yields the content of
a file. Printed addresses contain no secrets.

Not handled: writing, and directory listings of web servers. Servers must send the size of a file, and must be able to
send it uncompressed. If a server sends neither an ETag nor a modification time, a change that keeps the size is not
detected.

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
_TRIES = 5  # consecutive tries that yield no byte
_PAUSES_SECONDS = (0.2, 1.0, 3.0, 8.0)
_SILENT_SECONDS = 60  # of silence, after which a try has failed; a whole file may take longer
# Fields of a file's version in fsspec file systems, in lower case.
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
# Exceptions of stores that are not an OSError. They are looked up in packages that are already imported.
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
    """A remote file. ``mark`` is a fingerprint of its version, from the metadata that the store sends."""

    address: str
    num_bytes: int
    mark: str


def is_remote(source: str) -> bool:
    """Return whether a source is an address with a protocol, instead of a local path."""
    return _ADDRESS.match(source) is not None and not source.lower().startswith("hf:")


def shown(text: str) -> str:
    """Replace the secrets in a text with addresses by ``***``.

    Secrets are passwords and, in web addresses, a token before the host and the values in a query (``?sig=***``).
    """
    without = _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", text))
    return _QUERY.sub(lambda found: found[1] + "&".join(map(_shown_part, found[2].split("&"))), without)


def _shown_part(part: str) -> str:
    name, has_value, _ = part.partition("=")
    return f"{name}=***" if has_value else "***"


def without_secrets(value: T) -> T:
    """Return a JSON value with the secrets of all addresses replaced, see `shown`."""
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
    """Return the file name of an address, which determines the format."""
    path = next((part for part in address.split("::") if "://" in part), address)
    if path.lower().startswith(_WEB):
        path = path.partition("?")[0].partition("#")[0]
    return path.rstrip("/").rpartition("/")[2]


def look(source: str) -> tuple[list[Seen], bool]:
    """Return the files at an address, and whether it is the address of a single file.

    Args:
        source: the address of a file or folder (with all files below it), or a pattern with ``*`` and ``**`` if the
            store can list its files.

    Raises:
        DataError: if no file exists, the store is unreachable, or its protocol needs a package that is not installed.
    """
    path, infos = _tried(lambda: _listed(source), source)
    if not infos:
        raise _not_there(source)
    is_named = len(infos) == 1 and infos[0]["name"].rstrip("/") == path.rstrip("/")
    if is_named:
        return [_seen(infos[0], source)], True
    return [_seen(info, _address_of(str(info["name"]), source)) for info in infos], False


def pieces(address: str, num_bytes: int) -> Iterator[bytes]:
    """Yield the content of a file of ``num_bytes`` bytes, at most 8 MiB at a time.

    Raises:
        DataError: if the file cannot be read, or is larger than ``num_bytes``.
    """
    tries, done = _Tries(address), 0
    while done < num_bytes:
        try:
            for piece in _read(address, done, num_bytes):
                done += len(piece)
                if done > num_bytes:
                    raise DataError(
                        f"{shown(address)} is larger than the {num_bytes:,} bytes that its store reported: try again, "
                        "or download it"
                    )
                tries.succeeded()
                yield piece
            if done < num_bytes:
                raise ConnectionError(f"received {done:,} of {num_bytes:,} bytes")
        except _errors() as error:
            tries.failed(error)


def head(address: str, num_bytes: int) -> bytes:
    """Return up to ``num_bytes`` bytes from the start of a file, without reading much more."""
    return _tried(lambda: _head(address, num_bytes), address)


# -- asking a store ----------------------------------------------------------------------------------------------------


def _opened(source: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it."""
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
            f"{shown(source)} has an unknown protocol ({shown(str(error))}): use for example s3:// or https://"
        ) from None
    return opened, str(path)


def _options(protocols: list[str]) -> dict[str, Any]:
    """Return options that disable cached listings and the time limit of web downloads (300 s by default)."""
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
    """Return the path of an address in its store, and the metadata of each file that the address names."""
    opened, path = _opened(source)
    if any(sign in path for sign in "*?[") and not _is_web(opened):
        return path, _infos(opened, opened.glob(path))
    info = opened.info(path)
    if info["type"] != "directory":
        return path, [info]
    return path, _infos(opened, opened.find(path))


def _infos(opened: Any, names: list[str]) -> list[dict[str, Any]]:
    """Return the metadata of each file, requested one by one, because a directory listing may omit some fields."""
    return [info for info in map(opened.info, sorted(names)) if info["type"] == "file"]


def _address_of(name: str, source: str) -> str:
    """Return the address of a file found under ``source``, in the same archive if there is one."""
    first, chain, rest = source.partition("::")
    protocol, has_path, _ = first.partition("://")
    if not has_path:  # a cache before a store: `simplecache::s3://bucket`
        return f"{first}::{_address_of(name, rest)}"
    if "://" in name:
        return name
    return f"{protocol}://{name if protocol == 'file' else name.lstrip('/')}{chain}{rest}"


def _seen(info: dict[str, Any], address: str) -> Seen:
    if info.get("size") is None:
        raise DataError(f"the server does not send the size of {shown(address)}: download it, and pass the local file")
    # A web page instead of text is usually a login page or a directory listing.
    if info.get("mimetype") == "text/html" and not file_name(address).lower().endswith((".html", ".htm")):
        raise DataError(
            f"{shown(address)} is a web page, not a text file: give the address of each file, because web servers do "
            "not list files, and credentials if the page asks for a login"
        )
    said = {str(name).lower(): value for name, value in info.items()}
    mark = xxhash.xxh3_64_hexdigest("\0".join(str(said.get(name)) for name in _SAID).encode())
    return Seen(address, int(info["size"]), mark)


def _read(address: str, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a range, or fewer if the connection breaks."""
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
    """Yield a range of a web file in one request. A server without range requests sends the whole file."""
    headers = {**opened.kwargs.get("headers", {}), "Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
    with opened.open(path, "rb", block_size=0, size=end, headers=headers) as source:
        answered = source.r.headers
        if answered.get("Content-Encoding", "identity") != "identity":
            raise DataError(f"the server sends {shown(path)} only compressed: download it, and pass the local file")
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
    """Counter of failed reads. It waits before each retry, and raises errors that a retry cannot fix."""

    def __init__(self, address: str) -> None:
        self._address, self._num_failures = address, 0

    def succeeded(self) -> None:
        """Reset the counter after bytes have arrived."""
        self._num_failures = 0

    def failed(self, error: Exception) -> None:
        """Wait before the next try.

        Raises:
            DataError: if no further try is useful.
        """
        cause = _cause_of(error)
        status = getattr(cause, "status", None)
        if status in _GONE or isinstance(cause, FileNotFoundError):
            raise _not_there(self._address) from None
        if status in _FORBIDDEN or isinstance(cause, PermissionError) or _has_no_credentials(cause):
            raise DataError(
                f"{shown(self._address)} cannot be read without permission ({_said(cause)}): give fsspec credentials "
                "for it, or check whether a signed address is still valid"
            ) from None
        self._num_failures += 1
        is_final = isinstance(status, int) and status < 500 and status not in _MAY_PASS
        if is_final or self._num_failures == _TRIES:
            tries = "one try" if is_final else f"{_TRIES} tries"
            raise DataError(
                f"cannot read {shown(self._address)}: {tries} failed, the last with {type(cause).__name__} "
                f"({_said(cause)}): check the network and the store, and try again"
            ) from None
        time.sleep(_PAUSES_SECONDS[self._num_failures - 1])


def _tried(work: Callable[[], T], address: str) -> T:
    """Call a function that uses the network, and retry after temporary failures."""
    tries = _Tries(address)
    while True:
        try:
            return work()
        except _errors() as error:
            tries.failed(error)


def _errors() -> tuple[type[Exception], ...]:
    """Return the exception types that reading can raise: of the system, and of the imported store packages."""
    errors: list[type[Exception]] = [OSError, TimeoutError, EOFError]
    for module, names in _RAISED.items():
        with suppress(KeyError):
            errors += [getattr(sys.modules[module], name) for name in names]
    return tuple(errors)


def _cause_of(error: BaseException) -> BaseException:
    """Return the real cause of an error: fsspec reports refused connections as missing files."""
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
