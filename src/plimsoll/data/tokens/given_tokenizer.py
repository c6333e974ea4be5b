"""Loading of an existing tokenizer from a folder or file, and the files for its export.

``transformers.AutoTokenizer`` loads a folder, because its classes may override parts of ``tokenizer.json``. A lone
``tokenizer.json`` is loaded by ``tokenizers``. The files are exported unchanged, with two exceptions:

- If only the ``config.json`` of the model names the tokenizer class, the class is added to ``tokenizer_config.json``.
  The tokenizer may be exported next to another model.
- A lone file gets a ``tokenizer_config.json`` that names its special tokens.

Nothing is downloaded, and no code of a folder is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from plimsoll.data.tokens.template import template_of
from plimsoll.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_TOKEN = "<|endoftext|>"
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_ROLES_FILE = "special_tokens_map.json"
_OWN_FILES = (CONFIG_FILE, _ROLES_FILE, "added_tokens.json", "chat_template.jinja", "chat_template.json")
_MOST_IDENTIFIED_BYTES = 64 << 20  # larger files of a folder are weights
_END_ROLES = ("eos_token", "sep_token", "pad_token")
_ROLES = (*_END_ROLES, "bos_token", "cls_token", "unk_token", "mask_token")
_MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>", "<mask_1>")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>")
_END_NAMES = (END_TOKEN, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")


class Loaded(NamedTuple):
    """A loaded or trained tokenizer before it is cached, with its end token and optional mask and padding tokens.

    ``keeps_end``: texts are truncated at the beginning. ``own_files`` maps file names to contents for the export; it is
    empty for a tokenizer that was trained here.
    """

    backend: tokenizers.Tokenizer
    end_token: str
    mask_token: str | None = None
    pad_token: str | None = None
    keeps_end: bool = False
    own_files: Mapping[str, bytes] = MappingProxyType({})


class _Found(NamedTuple):
    """An existing tokenizer: its special tokens by role (such as ``eos_token``), its truncation side, and its files."""

    backend: tokenizers.Tokenizer
    roles: dict[str, str]
    truncation_side: str
    files: dict[str, bytes]


def load_tokenizer(path: Path, special_tokens: bool = True) -> Loaded:
    """Load an existing tokenizer, and determine its end-of-text token.

    Args:
        path: a folder or a file.
        special_tokens: whether the tokenizer adds its special tokens around a text.

    Raises:
        DataError: if no tokenizer can be loaded, or it has no end-of-text token.
    """
    if not path.exists():
        raise DataError(f"there is no tokenizer at {path}: give a folder with a {TOKENIZER_FILE}, or such a file")
    folder, file = _place(path)
    found = _from_file(file) if folder is None else _from_transformers(folder)
    backend, files = found.backend, found.files
    backend.no_truncation()
    backend.no_padding()
    end_token = _first_known(backend, found.roles, _END_ROLES, _END_NAMES)
    if end_token is None:
        raise DataError(
            f"the tokenizer {path} has no token for the end of a text: name one of its tokens as `eos_token` in the "
            f"tokenizer_config.json next to it"
        )
    mask_token = _first_known(backend, found.roles, ("mask_token",), _MASK_NAMES)
    pad_token = _first_known(backend, found.roles, ("pad_token",), _PAD_NAMES)
    if not special_tokens:
        backend = _without_template(backend)
        files = {TOKENIZER_FILE: backend.to_str(pretty=True).encode()}
    if CONFIG_FILE not in files:
        named = {"eos_token": end_token, "pad_token": pad_token or end_token, "mask_token": mask_token}
        guessed = named | _names_in_template(backend) if folder is None else {}
        settings = guessed | found.roles | {"truncation_side": found.truncation_side}
        files = files | {CONFIG_FILE: described({name: value for name, value in settings.items() if value})}
    return Loaded(backend, end_token, mask_token, pad_token, found.truncation_side == "left", files)


def described(settings: dict[str, str]) -> bytes:
    """Return the ``tokenizer_config.json`` for a tokenizer that has only a ``tokenizer.json``."""
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings, indent=2).encode()


def identity_of_tokenizer(path: Path) -> list[str]:
    """Return the identity of a given tokenizer: the library versions, and the hashes of its files."""
    if not path.exists():
        return []
    folder, file = _place(path)
    files = [file, *(file.with_name(name) for name in _OWN_FILES)] if folder is None else sorted(folder.iterdir())
    known = [one for one in files if one.is_file() and one.stat().st_size <= _MOST_IDENTIFIED_BYTES]
    hashes = [f"{one.name}:{hashlib.sha256(one.read_bytes()).hexdigest()}" for one in known]
    return [version("tokenizers"), version("transformers"), *hashes]


def _place(path: Path) -> tuple[Path | None, Path]:
    """Return the folder for transformers to load (``None`` if one file suffices), and the tokenizer file."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    says_more = any((file.parent / name).is_file() for name in (*_OWN_FILES, "config.json"))
    is_one_file = file.is_file() and (not says_more or file.name != TOKENIZER_FILE)
    return None if is_one_file else file.parent, file


def _first_known(
    backend: tokenizers.Tokenizer, roles: dict[str, str], wanted: tuple[str, ...], names: tuple[str, ...]
) -> str | None:
    """Return the first token in the vocabulary among the tokens of the ``wanted`` roles, then among ``names``."""
    tokens = [roles[role] for role in wanted if roles.get(role)] + list(names)
    return next((token for token in tokens if backend.token_to_id(token) is not None), None)


def _from_file(file: Path) -> _Found:
    """Load a tokenizer from one file, and the roles of its special tokens from files next to it, if they exist."""
    import tokenizers

    settings: dict[str, Any] = {}
    content = file.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
        for name in (_ROLES_FILE, CONFIG_FILE):
            if (beside := file.with_name(name)).is_file():
                settings |= json.loads(beside.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not a tokenizer of the `tokenizers` library ({error}): give another") from None
    named = {role: _content(settings[role]) for role in _ROLES if settings.get(role)}
    roles = {role: token for role, token in named.items() if backend.token_to_id(token) is not None}
    return _Found(backend, roles, "right", {TOKENIZER_FILE: content})


def _names_in_template(backend: tokenizers.Tokenizer) -> dict[str, str | None]:
    """Infer the roles of special tokens, by role name, from their positions around a text.

    The unknown token is taken from the settings of the tokenizer. A role without a token is ``None``.
    """
    template, model = template_of(backend), json.loads(backend.to_str())["model"]
    unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    return {
        "cls_token": backend.id_to_token(template.prefix[0]) if template.prefix else None,
        "sep_token": backend.id_to_token(template.suffix[-1]) if template.suffix else None,
        "unk_token": unknown if unknown is not None and backend.token_to_id(unknown) is not None else None,
    }


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _from_transformers(folder: Path) -> _Found:
    """Load a folder with transformers, which also reads older formats (vocab.json and merges.txt, vocab.txt, ...)."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, use_fast=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{folder} holds no tokenizer that transformers can load ({reason}): give another") from None
    if not loaded.is_fast:
        raise DataError(f"the tokenizer in {folder} has no fast form: convert it to a {TOKENIZER_FILE} first")
    roles = {role: getattr(loaded, role) for role in _ROLES if getattr(loaded, role)}
    names = (*loaded.vocab_files_names.values(), TOKENIZER_FILE, *_OWN_FILES)
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    settings = json.loads(files.get(CONFIG_FILE, b"{}"))
    if "tokenizer_class" not in settings:
        settings = {"tokenizer_class": type(loaded).__name__} | roles | settings
        files[CONFIG_FILE] = json.dumps(settings, indent=2).encode()
    return _Found(loaded.backend_tokenizer, roles, loaded.truncation_side, files)


def _without_template(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer that gives a text the same tokens, but adds no special tokens around it."""
    import tokenizers

    described = json.loads(backend.to_str())
    processor = described["post_processor"] or {}
    parts = processor["processors"] if processor.get("type") == "Sequence" else [processor]
    kept = [part for part in parts if part.get("type") == "ByteLevel"]  # it adds no tokens
    described["post_processor"] = kept[0] if kept else None
    changed = tokenizers.Tokenizer.from_str(json.dumps(described))
    changed.encode_special_tokens = backend.encode_special_tokens
    return changed
