"""How text is cut into words before byte-level BPE: a table by the name that the file gives.

The patterns are facts of each tokenizer's format. They are applied one after the other; each cuts
every piece that the earlier ones left, and both matches and gaps become pieces. A name that is not
in the table is an error: a wrong split gives plausible tokens and a quietly worse model.
"""

from __future__ import annotations

from dataclasses import dataclass

from aprefetch.errors import TokenizerError

__all__ = ["PreTokenizer", "known_names", "lookup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """What a `tokenizer.ggml.pre` name stands for.

    `patterns` are in Oniguruma syntax. `whole_words`: a word that is a token is taken as it is,
    without merging. `add_bos` holds when the file does not say it.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _ASCII_PUNCTUATION
    + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _TAIL,
)

# Cased letters of the scripts that have case, as the DeepSeek-LLM tokenizer lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)


def _words(letters: str, digits: str, not_symbol: str = r"\s\p{L}\p{N}") -> str:
    """The family that began with cl100k: contraction, word, digits, symbols, spaces."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}"
    return rf"{_CONTRACTION}|{word}|{digits}| ?[^{not_symbol}]+[\r\n]*|{_TAIL}"


def _cased_words(upper: str, lower: str, ending: str, digits: str, symbol_end: str) -> str:
    """The family that began with o200k: words end where a capital follows a small letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{symbol_end}*|{_TAIL}"
    )


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER_NOT_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER_NOT_HAN = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"

_CL100K = _words(r"\p{L}+", r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{L}+", r"\p{N}")
_QWEN35 = _words(r"[\p{L}\p{M}]+", r"\p{N}", r"\s\p{L}\p{M}\p{N}")
_O200K = _cased_words(_UPPER, _LOWER, f"{_CONTRACTION}?", r"\p{N}{1,3}", r"[\r\n/]")
_TEKKEN = _cased_words(_UPPER, _LOWER, "", r"\p{N}", r"[\r\n/]")
_KIMI_K2 = r"[\p{Han}]+|" + _cased_words(
    _UPPER_NOT_HAN, _LOWER_NOT_HAN, f"{_CONTRACTION}?", r"\p{N}{1,3}", r"[\r\n]"
)

_LLAMA_BPE = PreTokenizer(patterns=(_CL100K,), whole_words=True, add_bos=True)
_V3 = PreTokenizer(patterns=_DEEPSEEK_V3)

_TABLE: dict[str, PreTokenizer] = {
    "deepseek-v3": _V3,
    "joyai-llm": _V3,
    "hunyuan-dense": _V3,
    "deepseek-llm": PreTokenizer(patterns=_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(patterns=_DEEPSEEK_CODER),
    "gpt-2": PreTokenizer(patterns=(_GPT2,)),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": PreTokenizer(patterns=(_CL100K,)),
    "smaug-bpe": PreTokenizer(patterns=(_CL100K,)),
    "glm4": PreTokenizer(patterns=(_CL100K,)),
    "chatglm-bpe": PreTokenizer(patterns=(_CL100K,)),
    "qwen2": PreTokenizer(patterns=(_QWEN2,)),
    "qwen35": PreTokenizer(patterns=(_QWEN35,)),
    "gpt-4o": PreTokenizer(patterns=(_O200K,)),
    "minimax-m2": PreTokenizer(patterns=(_O200K,)),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), whole_words=True, add_bos=True),
    "kimi-k2": PreTokenizer(patterns=(_KIMI_K2,)),
}


def known_names() -> tuple[str, ...]:
    """All names of the table, sorted."""
    return tuple(sorted(_TABLE))


def lookup(name: object) -> PreTokenizer:
    """The entry for a `tokenizer.ggml.pre` value.

    Raises:
        TokenizerError: the name is missing, no string, or unknown; the message lists the known.
    """
    known = ", ".join(known_names())
    if name is None:
        raise TokenizerError(
            "the file does not say how text is split (no key tokenizer.ggml.pre), and guessing"
            f" would give wrong tokens; known names: {known}; or give a tokenizer.json"
        )
    entry = _TABLE.get(name) if isinstance(name, str) else None
    if entry is None:
        raise TokenizerError(
            f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known: {known};"
            " or give the model's tokenizer.json"
        )
    return entry
