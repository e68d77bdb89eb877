"""A vocabulary from a folder: `tokenizer.json`, with `tokenizer_config.json` beside it.

What else a folder may hold is in `rank_file`; `tokenizer.json` goes first.
Only byte-level BPE is accepted, as in the metadata: the one decoder of this package would give
wrong text for any other kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aprefetch.errors import TokenizerError
from aprefetch.text import bpe
from aprefetch.text.tokenizer import Tokenizer, TokenKind

__all__ = [
    "find_tokenizer_json",
    "load_tokenizer_json",
    "read_json",
    "read_text",
    "special_ids",
    "template_beside",
]

_KEYS = ("bos", "eos", "padding", "eot", "eom")


def find_tokenizer_json(places: Sequence[Path], *, explicit: bool) -> Path | None:
    """The one vocabulary of `places` (files or folders).

    In a folder that is its `tokenizer.json` or `<name>.tokenizer.json`, or without any of them its
    rank file, `tiktoken.model` or `<name>.tiktoken`.

    Raises:
        TokenizerError: there are several; or, if `explicit`, none.
    """
    found: dict[Path, Path] = {}
    for place in places:
        for candidate in _candidates(place):
            found.setdefault(candidate.resolve(), candidate)
    if len(found) > 1:
        names = ", ".join(sorted(str(path) for path in found.values()))
        raise TokenizerError(f"several tokenizers are equally good: {names}; give the path of one")
    if not found:
        if explicit:
            where = ", ".join(map(str, places))
            raise TokenizerError(
                f"no tokenizer.json or tiktoken.model at {where}; give that file or its folder"
            )
        return None
    return next(iter(found.values()))


def load_tokenizer_json(
    path: Path, metadata: Mapping[str, Any], *, n_vocab: int | None = None
) -> Tokenizer:
    """Builds the tokenizer; BOS and the like come from tokenizer_config.json, else `metadata`.

    A vocabulary smaller than `n_vocab` is filled up with unused ids, as padded embeddings need.

    Raises:
        TokenizerError: unreadable, not byte-level BPE, or larger than the model's embedding.
    """
    config = read_json(path)
    settings_path = path.with_name("tokenizer_config.json")
    settings = read_json(settings_path) if settings_path.is_file() else {}
    try:
        tokens, kinds = _table(config, n_vocab)
        encode_words = bpe.from_json(config)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    ids = special_ids(tokens, settings, metadata)
    add_bos = settings.get("add_bos_token", metadata.get("tokenizer.ggml.add_bos_token"))
    if add_bos is None:
        add_bos = _post_processor_adds(config, ids["bos"], tokens)
    return Tokenizer(
        tokens,
        kinds,
        encode_words,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        eog_ids=[i for i in (ids["eot"], ids["eom"]) if i is not None],
        add_bos=bool(add_bos) and ids["bos"] is not None,
        add_eos=bool(settings.get("add_eos_token", False)),
        origin=str(path),
        chat_template=template_beside(path, settings),
    )


def _candidates(place: Path) -> Iterable[Path]:
    try:
        if place.is_dir():
            exact = place / "tokenizer.json"
            named = place.glob("*.tokenizer.json")
            found = [p for p in (exact, *named) if p.is_file()]
            ranks = (place / "tiktoken.model", *place.glob("*.tiktoken"))
            return found or [p for p in ranks if p.is_file()]
        return [place] if place.is_file() else []
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot look for a tokenizer at {place}: {error}") from error


def read_text(path: Path) -> str:
    """The file's text. Raises TokenizerError."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object. Raises TokenizerError."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _table(config: Mapping[str, Any], n_vocab: int | None) -> tuple[list[str], list[int]]:
    model = config.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise TokenizerError("only BPE models are supported")
    if "ByteLevel" not in json.dumps(config.get("decoder")):
        raise TokenizerError("only byte-level BPE is supported (the decoder is not ByteLevel)")
    spelling_of: dict[int, tuple[str, int]] = {}
    try:
        for spelling, i in model["vocab"].items():
            spelling_of[i] = (spelling, TokenKind.NORMAL)
        for added in config.get("added_tokens") or ():
            if added.get("lstrip") or added.get("rstrip") or added.get("single_word"):
                raise TokenizerError(
                    f"the added token {added['content']!r} takes part of its surroundings"
                    " (lstrip, rstrip or single_word), which is not supported"
                )
            kind = TokenKind.CONTROL if added.get("special") else TokenKind.USER_DEFINED
            spelling_of[added["id"]] = (added["content"], kind)
        largest = max(spelling_of)
        sound = min(spelling_of) >= 0 and largest < 1 << 24
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TokenizerError(f"vocab or added_tokens are malformed: {error!r}") from error
    if not sound:
        raise TokenizerError(f"token ids from {min(spelling_of)} to {largest} make no sense")
    if n_vocab is not None and largest >= n_vocab:
        raise TokenizerError(
            f"it has token ids up to {largest}, but the model has only {n_vocab} embedding rows:"
            " it belongs to another model"
        )
    n_ids = largest + 1 if n_vocab is None else n_vocab
    table = [spelling_of.get(i, ("", TokenKind.UNUSED)) for i in range(n_ids)]
    return [spelling for spelling, _ in table], [int(kind) for _, kind in table]


def special_ids(
    tokens: list[str], settings: Mapping[str, Any], metadata: Mapping[str, Any]
) -> dict[str, int | None]:
    """Ids of BOS and the like: spellings in `settings`, else ids in `metadata`.

    Raises:
        TokenizerError: a spelling that is no token, or an id outside the vocabulary.
    """
    ids: dict[str, int | None] = {}
    for name in _KEYS:
        spelling = settings.get("pad_token" if name == "padding" else f"{name}_token")
        if isinstance(spelling, dict):
            spelling = spelling.get("content")
        value: Any
        if isinstance(spelling, str):
            try:
                value = tokens.index(spelling)
            except ValueError:
                raise TokenizerError(
                    f"tokenizer_config.json names {spelling!r} as {name}, which is no token"
                ) from None
        else:
            value = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if value is not None and not (type(value) is int and 0 <= value < len(tokens)):
                raise TokenizerError(
                    f"tokenizer.ggml.{name}_token_id is {value!r}, outside the vocabulary of"
                    f" {len(tokens)}"
                )
        ids[name] = value
    return ids


def _post_processor_adds(
    config: Mapping[str, Any], bos_id: int | None, tokens: Sequence[str]
) -> bool:
    """Whether the file's own post-processing begins with BOS."""
    if bos_id is None:
        return False
    post = config.get("post_processor") or {}
    steps = post.get("processors", [post]) if isinstance(post, dict) else []
    for step in steps:
        single = step.get("single") if isinstance(step, dict) else None
        if isinstance(single, list) and single and isinstance(single[0], dict):
            first = single[0].get("SpecialToken")
            return isinstance(first, dict) and first.get("id") == tokens[bos_id]
    return False


def template_beside(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template that belongs to the vocabulary at `path`, if there is one."""
    file = path.with_name("chat_template.jinja")
    if file.is_file():
        return read_text(file)
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None
