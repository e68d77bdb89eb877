"""Finds a model's vocabulary and builds the `Tokenizer`.

Order of places: the explicit option, then a `tokenizer.json` or else a rank file (`tiktoken.model`)
beside the model, then the GGUF's own metadata, then folders directly inside the model's. Two
candidates in one place are an error, and so is none at all. A file beside the model must agree with
the model, since it may have been left there for another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aprefetch.errors import TokenizerError
from aprefetch.text import bpe, pretokenizers
from aprefetch.text.rank_file import is_rank_file, load_rank_file
from aprefetch.text.tokenizer import IdsOnlyTokenizer, Tokenizer, TokenKind
from aprefetch.text.tokenizer_json import find_tokenizer_json, load_tokenizer_json

__all__ = ["VocabularySource", "from_metadata", "load_tokenizer"]

_PREFIX = "tokenizer.ggml."


class VocabularySource(Protocol):
    """What is needed of an open model file."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def paths(self) -> Sequence[Path]: ...


def load_tokenizer(
    source: VocabularySource, path: str | Path | None = None, *, n_vocab: int | None = None
) -> Tokenizer:
    """The tokenizer of `source`.

    Args:
        path: a tokenizer.json or a rank file, or a folder with one, to use instead of what is
            found; or one of the model's own files, to use its metadata whatever lies beside it.
        n_vocab: rows of the model's embedding; the vocabulary must fit them.

    Raises:
        TokenizerError: nothing found, two candidates, contradictions, or an unsupported kind.
    """
    metadata = source.metadata
    own = _PREFIX + "model" in metadata
    if path is not None:
        chosen = Path(path)
        if _is_one_of(chosen, source.paths):
            return from_metadata(metadata, n_vocab=n_vocab)
        found = find_tokenizer_json([chosen], explicit=True)
        assert found is not None
        return _from_file(found, metadata, n_vocab)
    folders = list(dict.fromkeys(p.parent for p in source.paths))
    found = find_tokenizer_json(folders, explicit=False)
    if found is not None:
        tokenizer = _from_file(found, metadata, n_vocab)
        if metadata.get(_PREFIX + "model") == "gpt2":
            _check_agreement(found, tokenizer, _strings(metadata, "tokens"))
        return tokenizer
    if own:
        return from_metadata(metadata, n_vocab=n_vocab)
    found = find_tokenizer_json(
        [f for place in folders for f in _folders_in(place)], explicit=False
    )
    if found is not None:
        return _from_file(found, metadata, n_vocab)
    raise TokenizerError(
        "no vocabulary: the file has no key tokenizer.ggml.model and no tokenizer.json lies beside"
        " it; give the path of the model's tokenizer.json or tiktoken.model"
    )


def _from_file(path: Path, metadata: Mapping[str, Any], n_vocab: int | None) -> Tokenizer:
    load = load_rank_file if is_rank_file(path) else load_tokenizer_json
    return load(path, metadata, n_vocab=n_vocab)


def _folders_in(place: Path) -> list[Path]:
    try:
        return sorted(p for p in place.iterdir() if p.is_dir())
    except OSError as error:
        raise TokenizerError(f"cannot look for a tokenizer at {place}: {error}") from error


def from_metadata(metadata: Mapping[str, Any], *, n_vocab: int | None = None) -> Tokenizer:
    """Builds the tokenizer from `tokenizer.ggml.*` alone. Raises TokenizerError."""
    model = metadata.get(_PREFIX + "model")
    if model in ("none", "no_vocab"):
        return _ids_only(metadata, n_vocab)
    if model != "gpt2":
        raise TokenizerError(
            f"vocabulary type {model!r} (tokenizer.ggml.model) is not supported; supported are"
            " 'gpt2' (byte-level BPE) and 'none' (token ids only)"
        )
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens is empty")
    if n_vocab is not None and len(tokens) != n_vocab:
        raise TokenizerError(
            f"tokenizer.ggml.tokens has {len(tokens)} tokens, but the model has {n_vocab}"
            " embedding rows"
        )
    kinds = _kinds(metadata, len(tokens))
    name = metadata.get(_PREFIX + "pre")
    pre = pretokenizers.lookup(name)
    vocab = _index(tokens)
    encode_words = bpe.from_merges(vocab, _merges(metadata, vocab, kinds, name), pre)
    bos_id = _id(metadata, "bos_token_id", len(tokens))
    add_bos = _flag(metadata, "add_bos_token", pre.add_bos and bos_id is not None)
    if add_bos and bos_id is None:
        raise TokenizerError(
            "tokenizer.ggml.add_bos_token is set, but tokenizer.ggml.bos_token_id is missing"
        )
    return Tokenizer(
        tokens,
        kinds,
        encode_words,
        bos_id=bos_id,
        eos_id=_id(metadata, "eos_token_id", len(tokens)),
        pad_id=_id(metadata, "padding_token_id", len(tokens)),
        eog_ids=_turn_ends(metadata, len(tokens)),
        add_bos=add_bos,
        add_eos=_flag(metadata, "add_eos_token", False),
        origin="metadata",
    )


def _ids_only(metadata: Mapping[str, Any], n_vocab: int | None) -> Tokenizer:
    if n_vocab is None:
        sizes = [v for k, v in metadata.items() if k.endswith(".vocab_size")]
        n_vocab = sizes[0] if sizes and isinstance(sizes[0], int) else 0
    limit = n_vocab or None
    return IdsOnlyTokenizer(
        n_vocab,
        bos_id=_id(metadata, "bos_token_id", limit),
        eos_id=_id(metadata, "eos_token_id", limit),
        eog_ids=_turn_ends(metadata, limit),
    )


def _turn_ends(metadata: Mapping[str, Any], limit: int | None) -> list[int]:
    ids = (_id(metadata, f"{name}_token_id", limit) for name in ("eot", "eom"))
    return [i for i in ids if i is not None]


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(_PREFIX + name)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise TokenizerError(f"tokenizer.ggml.{name} is missing or not a list of strings")
    strings = list(value)
    if not all(type(s) is str for s in strings):
        raise TokenizerError(f"tokenizer.ggml.{name} has elements that are no strings")
    return strings


def _kinds(metadata: Mapping[str, Any], n_tokens: int) -> list[int]:
    value = metadata.get(_PREFIX + "token_type")
    if value is None:
        raise TokenizerError(
            "tokenizer.ggml.token_type is missing: control tokens cannot be told from text"
        )
    try:
        kinds = [int(kind) for kind in value]
    except (TypeError, ValueError):
        raise TokenizerError("tokenizer.ggml.token_type is not a list of integers") from None
    if len(kinds) != n_tokens:
        raise TokenizerError(
            f"tokenizer.ggml.token_type has {len(kinds)} elements for {n_tokens} tokens"
        )
    known = {int(kind) for kind in TokenKind}
    unknown = set(kinds) - known
    if unknown:
        raise TokenizerError(f"tokenizer.ggml.token_type has unknown values {sorted(unknown)}")
    return kinds


def _index(tokens: list[str]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(tokens)}
    vocab.pop("", None)
    if len(vocab) + tokens.count("") != len(tokens):
        first = next(t for i, t in enumerate(tokens) if t and vocab[t] != i)
        raise TokenizerError(f"tokenizer.ggml.tokens has the token {first!r} twice")
    return vocab


def _merges(
    metadata: Mapping[str, Any], vocab: dict[str, int], kinds: list[int], pre: object
) -> list[tuple[str, str]]:
    if _PREFIX + "merges" not in metadata:
        if pre != "kimi-k2":
            raise TokenizerError(
                "tokenizer.ggml.merges is missing, and a byte-level BPE cannot do without"
            )
        # This family's ids are ranks, so the merges follow from the tokens.
        normal = {token: i for token, i in vocab.items() if kinds[i] == TokenKind.NORMAL}
        return bpe.rank_merges(normal)
    pairs: list[tuple[str, str]] = []
    for line in _strings(metadata, "merges"):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise TokenizerError(f"tokenizer.ggml.merges has {line!r}, which is no pair")
        pairs.append((left, right))
    return pairs


def _id(metadata: Mapping[str, Any], name: str, limit: int | None) -> int | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TokenizerError(f"tokenizer.ggml.{name} is {value!r}, not an integer")
    if value < 0 or (limit is not None and value >= limit):
        raise TokenizerError(f"tokenizer.ggml.{name} is {value}, outside the vocabulary of {limit}")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"tokenizer.ggml.{name} is {value!r}, not a boolean")
    return value


def _is_one_of(path: Path, own: Sequence[Path]) -> bool:
    return any(path == p or path.resolve() == p.resolve() for p in own)


def _check_agreement(path: Path, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """A tokenizer.json found beside the model must be this model's."""
    wrong = tokenizer.first_difference(tokens)
    if wrong is not None:
        raise TokenizerError(
            f"{path} lies beside the model but is of another vocabulary (they differ at token id"
            f" {wrong}); move it away, or give the model file itself as the tokenizer's path to use"
            " its own vocabulary"
        )
