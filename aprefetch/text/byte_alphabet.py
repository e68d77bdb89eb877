"""The 256 printable characters that stand for bytes in a byte-level vocabulary.

Printable Latin-1 characters stand for themselves; the other bytes, in order, are shown as the
characters from U+0100 on. A token spelled only with these is a byte string; any other spelling
(control tokens mostly) is plain text.
"""

from __future__ import annotations

__all__ = ["CHAR_OF_BYTE", "spelled_bytes"]


def _alphabet() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    chars, beyond = [], 0x100
    for byte in range(256):
        if byte in printable:
            chars.append(chr(byte))
        else:
            chars.append(chr(beyond))
            beyond += 1
    return tuple(chars)


CHAR_OF_BYTE: tuple[str, ...] = _alphabet()
"""Index: byte value."""

_NO_BYTE = "\uffff"
# Characters below U+0100 that stand for no byte must not survive the translation as if they did.
_TO_LATIN1 = dict.fromkeys(range(256), _NO_BYTE) | {
    ord(char): chr(byte) for byte, char in enumerate(CHAR_OF_BYTE)
}


def spelled_bytes(spelling: str) -> bytes:
    """The bytes of a token; the UTF-8 of its text if it is spelled outside the alphabet."""
    try:
        return spelling.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return spelling.encode("utf-8", "replace")
