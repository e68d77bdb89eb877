"""A vocabulary from a rank file (`tiktoken.model`): a line has a token's base64 and its rank.

Ranks are the ids. There are no merges: the adjacent pair whose joined bytes have the lowest rank is
joined first, and a word that is a token is taken whole. The file names no special tokens; they
follow the ranks, and their names are in `tokenizer_config.json` beside it, else in the model file.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprefetch.errors import TokenizerError
from aprefetch.text import bpe, pretokenizers
from aprefetch.text.byte_alphabet import CHAR_OF_BYTE
from aprefetch.text.tokenizer import Tokenizer, TokenKind
from aprefetch.text.tokenizer_json import read_json, special_ids, template_beside

__all__ = ["is_rank_file", "load_rank_file"]

_PRE = "kimi-k2"  # the family that is published this way, if the model file does not say
_N_SLOTS = 256  # ids kept for special tokens, named or not


def is_rank_file(path: Path) -> bool:
    """By its name; what it holds is checked on loading."""
    return path.suffix in (".model", ".tiktoken")


def load_rank_file(
    path: Path, metadata: Mapping[str, Any], *, n_vocab: int | None = None
) -> Tokenizer:
    """Builds the tokenizer; the way that text is cut into words is the model file's, else Kimi's.

    Raises:
        TokenizerError: unreadable, no rank file, or larger than the model's embedding.
    """
    tokens = _read(path)
    settings_path = path.with_name("tokenizer_config.json")
    settings = read_json(settings_path) if settings_path.is_file() else {}
    n_ranks = len(tokens)
    n_ids = n_ranks + _N_SLOTS if n_vocab is None else n_vocab
    if n_ranks > n_ids:
        raise TokenizerError(
            f"{path} has {n_ranks} tokens, but the model has only {n_ids} embedding rows: it"
            " belongs to another model"
        )
    names = _names(path, settings)
    outside = [i for i in names if not n_ranks <= i < n_ids]
    if outside:
        raise TokenizerError(
            f"{settings_path} names the special token {outside[0]}, which is not among the ids"
            f" {n_ranks} to {n_ids - 1} that are left for them"
        )
    names = names or _names_in(metadata)
    pre = replace(pretokenizers.lookup(metadata.get("tokenizer.ggml.pre", _PRE)), whole_words=True)
    vocab = {token: i for i, token in enumerate(tokens)}
    encode_words = bpe.from_merges(vocab, bpe.rank_merges(vocab), pre)
    kinds = [int(TokenKind.NORMAL)] * n_ranks
    for i in range(n_ranks, n_ids):
        spelling, kind = names.get(i, (f"<|reserved_token_{i}|>", TokenKind.UNUSED))
        tokens.append(spelling)
        kinds.append(int(kind))
    ids = special_ids(tokens, settings, metadata)
    return Tokenizer(
        tokens,
        kinds,
        encode_words,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        eog_ids=[i for i in (ids["eot"], ids["eom"]) if i is not None],
        add_bos=bool(settings.get("add_bos_token", False)) and ids["bos"] is not None,
        add_eos=bool(settings.get("add_eos_token", False)),
        origin=str(path),
        chat_template=template_beside(path, settings),
    )


def _read(path: Path) -> list[str]:
    """Tokens by rank, spelled in the byte alphabet."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    by_rank: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            raw = base64.b64decode(encoded, validate=True)
            at = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{path} is no rank file: line {number} is not base64 and a number"
            ) from None
        if at in by_rank:
            raise TokenizerError(f"{path} has rank {at} twice (line {number})")
        by_rank[at] = "".join(map(CHAR_OF_BYTE.__getitem__, raw))
    tokens = [by_rank[i] for i in range(len(by_rank)) if i in by_rank]
    if not tokens or len(tokens) != len(by_rank):
        raise TokenizerError(f"{path} is no rank file: its ranks are not 0, 1, 2, ...")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{path} has the same token with two ranks")
    return tokens


def _names(path: Path, settings: Mapping[str, Any]) -> dict[int, tuple[str, TokenKind]]:
    """Special tokens by id, as `added_tokens_decoder` names them."""
    table = settings.get("added_tokens_decoder") or {}
    try:
        return {int(i): (str(entry["content"]), TokenKind.CONTROL) for i, entry in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        where = path.with_name("tokenizer_config.json")
        raise TokenizerError(f"{where}: added_tokens_decoder is malformed: {error!r}") from error


def _names_in(metadata: Mapping[str, Any]) -> dict[int, tuple[str, TokenKind]]:
    """Control tokens by id, as the model file names them."""
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if tokens is None or kinds is None or len(tokens) != len(kinds):
        return {}
    special = (TokenKind.CONTROL, TokenKind.USER_DEFINED)
    return {
        i: (token, TokenKind(kind))
        for i, (token, kind) in enumerate(zip(tokens, map(int, kinds), strict=True))
        if kind in special
    }
