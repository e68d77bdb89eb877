"""Builds the word encoder: splits, byte alphabet and BPE merges, run by the `tokenizers` library.

The library is imported on first use. It gets no special tokens: `Tokenizer` cuts those out before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aprefetch.errors import TokenizerError
from aprefetch.text.pretokenizers import PreTokenizer

if TYPE_CHECKING:
    import tokenizers

__all__ = ["from_json", "from_merges", "rank_merges"]


def from_merges(
    vocab: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer
) -> Callable[[str], list[int]]:
    """An encoder of plain text. Raises TokenizerError if a merge names a missing token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"the merges do not fit the vocabulary: {error}") from error
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return _encoder(backend)


def from_json(config: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """An encoder from the parsed content of a tokenizer.json, without its added tokens."""
    from tokenizers import Tokenizer

    plain = {**config, "added_tokens": [], "post_processor": None}
    plain |= {"truncation": None, "padding": None}
    try:
        backend = Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"the tokenizers library refuses it: {error}") from error
    return _encoder(backend)


def rank_merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges for a vocabulary whose ids are ranks and that has no merge list of its own.

    The adjacent pair whose joined bytes have the lowest id is merged first: every way to cut a
    token into two tokens is a merge, in the order of ids.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(vocab, key=vocab.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in vocab and right in vocab]
    return merges


def _encoder(backend: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    def encode_words(text: str) -> list[int]:
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # for instance the regex engine's limits
            raise TokenizerError(f"the text could not be split into tokens: {error}") from error
        return ids

    return encode_words
