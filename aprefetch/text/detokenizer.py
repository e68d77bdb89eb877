"""Text piece by piece from token ids, cut at stop strings.

A `Detokenizer` belongs to one answer. Its pieces joined are `tokenizer.decode` of all ids, up to
the first stop string: bytes of a character that is not complete wait, and so does text that could
begin a stop string. The first stop string is the one that is complete first, whatever the tokens'
borders; of those that end at one place, the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from aprefetch.errors import InvalidRequestError
from aprefetch.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Feed ids to `push`, then call `flush` once.

    Args:
        stop: strings that end the text; neither they nor what follows is given out.
        skip_special: leave control tokens out of the text.
        keep: control tokens that stay in it all the same.

    Raises:
        InvalidRequestError: a stop string is empty or no string (param "stop").
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        keep: Collection[int] = (),
    ) -> None:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise InvalidRequestError("stop strings must be non-empty strings", param="stop")
        self._token_bytes = tokenizer.token_bytes
        hidden = tokenizer.special_ids if skip_special else frozenset()
        self._hidden: frozenset[int] = hidden - frozenset(keep)
        self._stops = stops
        self._longest_prefix = max(map(len, stops), default=1) - 1
        self._decoder = _utf8_decoder("replace")
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """Adds one token: the text that became certain, and whether a stop string is complete.

        Once stopped, further tokens give nothing.

        Raises:
            InvalidRequestError: an id outside the vocabulary.
        """
        if self.stopped:
            return "", True
        if token_id in self._hidden:
            return "", False
        text = self._decoder.decode(self._token_bytes(token_id))
        if text and self._stops:
            text = self._search(text)
        return text, self.stopped

    def flush(self) -> str:
        """The rest: held text, and U+FFFD for an incomplete character. A second call gives ""."""
        if self.stopped:
            return ""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        if self._stops:
            text = self._search(text) + self._held
            self._held = ""
        return text

    def _search(self, new: str) -> str:
        text = self._held + new
        end = start = len(text) + 1
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (at + len(stop), at) < (end, start):
                end, start = at + len(stop), at
        if start <= len(text):
            self.stopped, self._held = True, ""
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def _possible_start(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string."""
        for at in range(max(0, len(text) - self._longest_prefix), len(text)):
            tail = text[at:]
            for stop in self._stops:
                if stop.startswith(tail):
                    return at
        return len(text)
