"""The base classes of records: immutable objects that are stored as JSON files with a kind and a schema version.

    {"record": "run", "schema": 1, ...fields...}

Reading fails if the kind, the schema version or a field is not the expected one. The error names the difference.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from plimsoll.errors import OutputError, RecordError
from plimsoll.records import Shown
from plimsoll.records.former import renamed, warn_of_former


class Frozen(BaseModel):
    """An immutable object that is compared by its fields and accepts only declared fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="constants")


class FormerNames(Frozen):
    """An object that also accepts the field names of the previous release.

    ``former_names`` maps them to the current names.
    """

    former_names: ClassVar[Mapping[str, str]]

    @model_validator(mode="before")
    @classmethod
    def _with_names_of_today(cls, fields: Any) -> Any:
        return renamed(fields, cls.former_names) if isinstance(fields, dict) else fields

    if not TYPE_CHECKING:  # with __getattr__, mypy would accept every attribute name

        def __getattr__(self, name: str) -> Any:
            today = type(self).former_names.get(name)
            if today is None:
                return super().__getattr__(name)
            warn_of_former(f"{type(self).__name__}.{name}", f"{type(self).__name__}.{today}")
            return getattr(self, today)


class Record(Frozen, Shown):
    """An immutable object that can be stored as a JSON file."""

    record_kind: ClassVar[str]
    schema_version: ClassVar[int] = 1
    also_reads: ClassVar[frozenset[int]] = frozenset()
    """Earlier schema versions that `from_json` also reads."""
    former_kind: ClassVar[str | None] = None

    def to_json(self) -> str:
        """Return the record as one JSON object with its kind and schema version."""
        head = {"record": self.record_kind, "schema": self.schema_version}
        return json.dumps(head | self.model_dump(mode="json"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, source: str = "record") -> Self:
        """Read a record from JSON text.

        Args:
            text: a JSON object, as from `to_json`.
            source: the name of the text in error messages, such as its path.

        Raises:
            RecordError: if the text is not JSON, or the record has another kind, schema version or set of fields.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(f"{source} is not JSON ({error}): it may be truncated; write it again") from None
        kinds = {cls.record_kind, cls.former_kind or cls.record_kind}
        if not isinstance(fields, dict) or fields.get("record") not in kinds:
            found = fields.get("record") if isinstance(fields, dict) else type(fields).__name__
            raise RecordError(
                f"{source} holds a record of kind {found!r}, but {cls.record_kind!r} is needed here: give "
                "a file of that kind"
            )
        if fields.get("schema") not in {cls.schema_version, *cls.also_reads}:
            raise RecordError(
                f"{source} has schema version {fields.get('schema')!r} of record {cls.record_kind!r}; this Plimsoll "
                f"reads version {cls.schema_version}: use the Plimsoll that wrote it, or make the record again"
            )
        return cls._validated({k: v for k, v in fields.items() if k not in ("record", "schema")}, source)

    @classmethod
    def _validated(cls, fields: dict[str, Any], source: str) -> Self:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise RecordError(
                f"{source} is not a valid {cls.record_kind!r} record ({wrong}): make the record again"
            ) from None

    def save(self, path: Path) -> None:
        """Write the record to ``path`` atomically (see `write_atomically`)."""
        write_atomically(path, self.to_json().encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record from a file.

        Raises:
            RecordError: if the file is missing, cannot be read or is not a record of this kind.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RecordError(f"there is no {cls.record_kind!r} record at {path}: check the path") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(
                f"cannot read {path} as a {cls.record_kind!r} record ({error}): give a JSON file"
            ) from None
        return cls.from_json(text, source=str(path))


def cache_folder() -> Path:
    """Return the cache folder: ``$PLIMSOLL_CACHE``, else ``plimsoll`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("PLIMSOLL_CACHE"):
        return Path(own)
    if usual := os.environ.get("XDG_CACHE_HOME"):
        return Path(usual) / "plimsoll"
    try:
        return Path.home() / ".cache" / "plimsoll"
    except RuntimeError:  # the user has no home folder, as in some containers
        return Path(tempfile.gettempdir()) / f"plimsoll-{os.getuid()}"


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk.

    Raises:
        OSError: if writing to the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_WAYS_OUT = {
    errno.ENOENT: ", or make the folder",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ", or free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ", or change its permissions"),
}


def write_atomically(path: Path, content: bytes | Iterable[bytes], option: str = "--out", mode: int = 0o666) -> None:
    """Write a file atomically: at any moment, also after a crash, it has its complete old or new content.

    The content goes to a temporary file in the same folder, which is flushed to the disk and then renamed.

    Args:
        path: the file to write.
        content: the new content: bytes, or an iterable of chunks of bytes.
        option: the command-line option that sets the path; the error message suggests to change it.
        mode: permission bits of the file, before the umask.

    Raises:
        OutputError: if the folder cannot be written or the disk is full. The old file is then unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        remedy = _WAYS_OUT.get(error.errno or 0, "")
        raise OutputError(f"cannot write {path}: {error.strerror}; give another {option}{remedy}") from error
    finally:
        # After the rename the temporary file does not exist; after a failed write, deleting it may fail, too.
        with contextlib.suppress(OSError):
            temporary.unlink()
