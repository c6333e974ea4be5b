"""Where the rows are in a JSON file that is one object: in the list of one of its fields, or it is itself a row.

A list of objects is read where it is the only one. Whatever else an object may be (several lists, columns, a row with a
list of its own) is refused with what to type, so that nothing in it is left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from plimsoll.data.formats import Reading
from plimsoll.data.formats.helpers.columns import WORDS_NAMES, listed
from plimsoll.data.text.json_values import Field, fields_of_object
from plimsoll.errors import DataError


def field_of_rows(chunks: Iterator[bytes], reading: Reading) -> str | None:
    """Return which field of the one object of a file has the rows; ``None`` where it is a row, or there are several.

    Args:
        chunks: the bytes of the file.
        reading: what of it is a text. A column that is asked for says whether the object is the row.

    Raises:
        DataError: if it cannot be told; the message names no file.
    """
    fields = fields_of_object(chunks, reading.max_text_bytes)
    if fields is None:
        return None
    lists = [name for name, field in fields.items() if field.num_objects]
    is_row = _has_text(fields, reading)
    if len(lists) == 1 and not is_row:
        return lists[0]
    is_asked_for = is_row and reading.columns is not None
    if lists and not (is_asked_for and not any(_has_text(fields[name].names, reading) for name in lists)):
        raise DataError(_ambiguous(fields, lists, is_row))
    if not reading.is_tagged:
        _require_row(fields, reading, is_row)
    return None


def _has_text(names: Collection[str], reading: Reading) -> bool:
    """Return whether an object with fields of these names has the text that is asked for, or that is looked for."""
    if reading.columns is not None:
        return all(name in names for name in reading.columns)
    return any(name in names for name in (WORDS_NAMES if reading.is_tagged else ("text",)))


def _ambiguous(fields: dict[str, Field], lists: list[str], is_row: bool) -> str:
    number = f"{len(lists)} lists" if len(lists) > 1 else "a list"
    own = "a text of its own and " if is_row else ""
    as_one = ", or put [ and ] around the object if it is one text" if is_row else ""
    return (
        f"it is one object with {own}{number} of objects ({_shown(fields, lists)}), so it cannot be told where the "
        f"texts are; write the one that is meant as JSON lines, for example with `{_command(lists[0])}`{as_one}"
    )


def _require_row(fields: dict[str, Field], reading: Reading, is_row: bool) -> None:
    """Refuse an object whose fields are columns, or in which the text would have to be guessed."""
    columns = [name for name in reading.columns or ("text",) if is_row and fields[name].is_nested]
    nested = [name for name, field in fields.items() if field.is_nested]
    if columns:
        raise DataError(
            f"it is one object of columns ({_shown(fields, columns)}), not of rows; write a row in each line of a "
            "file that ends in .jsonl, for example with pandas: "
            'read_json("FILE.json").to_json("FILE.jsonl", orient="records", lines=True)'
        )
    if nested and not is_row and reading.columns is None:
        raise DataError(
            f"it is one object without a list of objects, and none of its fields {listed(list(fields))} is called "
            f"text ({_shown(fields, nested)}); write its texts as JSON lines, or give the field with text: <column> "
            "if the object is one text"
        )


def _shown(fields: dict[str, Field], names: list[str]) -> str:
    some = ", ".join(f"{name!r} is {fields[name].kind}" for name in names[:10])
    return f"{some} and {len(names) - 10} more" if len(names) > 10 else some


def _command(name: str) -> str:
    path = f".{name}" if name.isidentifier() and name.isascii() else f".[{json.dumps(name)}]"
    return f"jq -c '{path}[]' FILE.json > FILE.jsonl"
