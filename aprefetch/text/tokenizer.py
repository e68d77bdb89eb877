"""From text to token ids and back.

A `Tokenizer` owns the token table. Control and user-defined tokens are cut out of the text here;
the plain text between them goes to a byte-level BPE. Ids become bytes by the table, so decoding
has no state: the text of a list of ids is its joined bytes read as UTF-8, with U+FFFD for what is
not UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cached_property

from aprefetch.errors import InvalidRequestError, TokenizerError
from aprefetch.text.byte_alphabet import CHAR_OF_BYTE, spelled_bytes

__all__ = ["IdsOnlyTokenizer", "TokenKind", "Tokenizer"]


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_HIDDEN = frozenset({TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.UNUSED})
_AS_TEXT = frozenset({*_HIDDEN, TokenKind.USER_DEFINED})

# Control tokens by which models end a turn, whatever the file's keys say.
_ENDINGS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
        "<|endoftext|>", "<|end_of_text|>", "<|end_of_msg|>", "<end_of_turn>", "<|user|>",
        "<|observation|>", "</s>", "[EOS]", "[EOT]",
    }
)  # fmt: skip


class Tokenizer:
    """A byte-level BPE vocabulary with its special tokens. Immutable; may be shared by threads.

    Attributes: `n_vocab` (ids run from 0 to `n_vocab - 1`), `bos_id`, `eos_id`, `pad_id` (or None),
    `add_bos`, `add_eos`, `eog_ids` (each ends a generation), `special_ids` (not printed),
    `origin` (where the vocabulary came from, for people).
    """

    def __init__(
        self,
        tokens: Sequence[str],
        kinds: Sequence[int],
        encode_words: Callable[[str], list[int]],
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        eog_ids: Iterable[int] = (),
        add_bos: bool = False,
        add_eos: bool = False,
        origin: str = "",
        chat_template: str | None = None,
    ) -> None:
        """Args: `encode_words` turns text without special tokens into ids (no BOS)."""
        self._tokens = tokens
        self._kinds = kinds
        self._encode_words = encode_words
        self.n_vocab = len(tokens)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.origin = origin
        self.chat_template = chat_template
        named = [i for i in range(self.n_vocab) if kinds[i] != TokenKind.NORMAL]
        self.special_ids: frozenset[int] = frozenset(i for i in named if kinds[i] in _HIDDEN)
        ends = {i for i in named if kinds[i] == TokenKind.CONTROL and tokens[i] in _ENDINGS}
        ends.update(eog_ids)
        if eos_id is not None:
            ends.add(eos_id)
        self.eog_ids: frozenset[int] = frozenset(ends)
        self._user_ids = {tokens[i]: i for i in named if kinds[i] == TokenKind.USER_DEFINED}
        self._marker_ids = self._user_ids | {
            tokens[i]: i for i in named if kinds[i] in (TokenKind.CONTROL, TokenKind.UNKNOWN)
        }

    # ---- text -> ids

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: put BOS before (and EOS after) the text, where the model wants it. It is
                put there even if the text spells a BOS itself; `encode_prompt` avoids that.
            parse_special: control tokens spelled in the text become these tokens; otherwise they
                are plain text. User-defined tokens are always recognised.

        Raises:
            InvalidRequestError: not a string, lone surrogates, or bytes that no token has.
        """
        self._check_text(text)
        markers = self._all_markers if parse_special else self._user_markers
        ids_of = self._marker_ids
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        at = 0
        for match in markers.finditer(text) if markers is not None else ():
            if match.start() > at:
                ids += self._encode_words(text[at : match.start()])
            ids.append(ids_of[match.group()])
            at = match.end()
        if at < len(text):
            ids += self._encode_words(text[at:] if at else text)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_prompt(self, text: str, parse_special: bool = True) -> list[int]:
        """Ids to continue from: BOS exactly once where the model wants it, never an EOS added.

        A rendered chat template may spell BOS itself; then none is added.
        """
        ids = self.encode(text, add_special=False, parse_special=parse_special)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_id(self, spelling: str) -> int | None:
        """The id of a control or user-defined token by its text; None if there is none."""
        return self._marker_ids.get(spelling)

    # ---- ids -> text

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`; control tokens are printed unless `skip_special`.

        Raises:
            InvalidRequestError: an id outside the vocabulary.
        """
        hidden = self.special_ids if skip_special else ()
        joined = b"".join([self.token_bytes(i) for i in ids if i not in hidden])
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the output; possibly a part of a UTF-8 character."""
        if not 0 <= token_id < self.n_vocab:
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary (0 to {self.n_vocab - 1})",
                param="token_ids",
            )
        spelling = self._tokens[token_id]
        if self._kinds[token_id] in _AS_TEXT:
            return spelling.encode("utf-8", "replace")
        return spelled_bytes(spelling)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def first_difference(self, tokens: Sequence[str]) -> int | None:
        """The lowest id whose spelling here is not that in `tokens`; unused ids agree."""
        pairs = zip(self._tokens, tokens, strict=False)
        for i, (mine, theirs) in enumerate(pairs):
            if mine != theirs and self._kinds[i] != TokenKind.UNUSED:
                return i
        n_other = len(tokens)
        beyond = (i for i in range(n_other, self.n_vocab) if self._kinds[i] != TokenKind.UNUSED)
        return next(beyond, None)

    # ---- inside

    @cached_property
    def _all_markers(self) -> re.Pattern[str] | None:
        return _alternatives(self._marker_ids)

    @cached_property
    def _user_markers(self) -> re.Pattern[str] | None:
        return _alternatives(self._user_ids)

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        have = set(self._tokens)
        return frozenset(b for b, char in enumerate(CHAR_OF_BYTE) if char not in have)

    def _check_text(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"text must be a str, not {type(text).__name__}", param="prompt"
            )
        try:
            utf8 = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has a lone surrogate at character {error.start}, which is no character"
                " of Unicode; decode the input as UTF-8 with errors='replace'",
                param="prompt",
            ) from None
        if self._missing_bytes and not self._missing_bytes.isdisjoint(utf8):
            byte = min(self._missing_bytes.intersection(utf8))
            raise InvalidRequestError(
                f"the vocabulary has no token for byte 0x{byte:02x} of the text", param="prompt"
            )


class IdsOnlyTokenizer(Tokenizer):
    """For files whose `tokenizer.ggml.model` is "none": ids in, ids out, no text."""

    def __init__(
        self, n_vocab: int, *, bos_id: int | None, eos_id: int | None, eog_ids: Iterable[int]
    ) -> None:
        super().__init__(
            (), (), _refuse_text, bos_id=bos_id, eos_id=eos_id, eog_ids=eog_ids, origin="none"
        )
        self.n_vocab = n_vocab

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Always raises TokenizerError."""
        return _refuse_text(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Always empty."""
        return b""


def _refuse_text(text: str) -> list[int]:
    raise TokenizerError(
        "this model has no vocabulary (tokenizer.ggml.model is 'none'): pass token ids, not text,"
        " or give a tokenizer.json"
    )


def _alternatives(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the leftmost and, there, the longest of the spellings."""
    ordered = sorted((s for s in spellings if s), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
