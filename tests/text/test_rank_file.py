"""Vocabularies from rank files, and where a vocabulary is looked for."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from aprefetch.errors import TokenizerError
from aprefetch.text.byte_alphabet import CHAR_OF_BYTE
from aprefetch.text.vocab import load_tokenizer

TEXT = (
    "the lighthouse keeper wrote everything down; newlines and hello World, 今天好 1234567\n\n  x"
)
NAMES = {"[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|sep|>": 5}


def learned(n_merges: int = 60) -> list[bytes]:
    """256 bytes, and tokens joined from neighbours in a text, as a trainer would."""
    tokens = [bytes([b]) for b in range(256)]
    words = [[bytes([b]) for b in word.encode()] for word in (TEXT * 2).split(" ")]
    for _ in range(n_merges):
        pairs: dict[bytes, int] = {}
        for word in words:
            for a, b in zip(word, word[1:], strict=False):
                pairs[a + b] = pairs.get(a + b, 0) + 1
        best = max(sorted(set(pairs) - set(tokens)), key=pairs.__getitem__)
        tokens.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == best:
                    word[i : i + 2] = [best]
                i += 1
    return tokens


TOKENS = learned()
N_VOCAB = len(TOKENS) + 256


def write_ranks(folder: Path, name: str = "tiktoken.model", tokens: list[bytes] = TOKENS) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)]
    random.Random(1).shuffle(lines)
    (folder / name).write_bytes(b"".join(lines))
    return folder / name


def write_names(folder: Path, **changes: Any) -> None:
    first = len(TOKENS)
    decoder = {str(first + at): {"content": name} for name, at in NAMES.items()}
    settings = {"added_tokens_decoder": decoder, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))


def lowest_rank_first(word: bytes) -> list[int]:
    """The rule itself."""
    ranks = {token: i for i, token in enumerate(TOKENS)}
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([b]) for b in word]
    while True:
        joined = [ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:], strict=False)]
        if not joined or min(joined) == 1 << 30:
            return [ranks[part] for part in parts]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_the_lowest_rank_is_joined_first(tmp_path, make_source):
    write_ranks(tmp_path)
    tokenizer = load_tokenizer(make_source({}, [tmp_path / "m.gguf"]))
    rng = random.Random(5)
    for _ in range(300):
        word = "".join(rng.choices("thelighouskprwndy", k=rng.randint(1, 12)))
        assert tokenizer.encode(word) == lowest_rank_first(word.encode()), word
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())


def test_words_are_cut_as_in_kimi(tmp_path, make_source):
    write_ranks(tmp_path, tokens=[*TOKENS, b"oW", b"34"])
    tokenizer = load_tokenizer(make_source({}, [tmp_path / "m.gguf"]))
    cuts = [tokenizer.decode([i]) for i in tokenizer.encode("helloWorld 1234")]
    assert "oW" not in cuts
    assert "34" not in cuts


def test_special_tokens_are_named_beside_it(tmp_path, make_source):
    write_ranks(tmp_path)
    write_names(tmp_path)
    tokenizer = load_tokenizer(make_source({}, [tmp_path / "m.gguf"]), n_vocab=N_VOCAB)
    first = len(TOKENS)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (first, first + 1)
    assert tokenizer.eog_ids == {first + 1, first + 2}
    assert tokenizer.encode("<|open|>the<|sep|>")[::2] == [first + 3, first + 5]
    assert first + 3 not in tokenizer.encode("<|open|>", parse_special=False)
    assert tokenizer.decode([first + 4]) == f"<|reserved_token_{first + 4}|>"
    assert tokenizer.n_vocab == N_VOCAB
    assert tokenizer.origin == str(tmp_path / "tiktoken.model")


def test_special_tokens_are_named_in_the_model_file(tmp_path, make_source):
    tokens = ["".join(CHAR_OF_BYTE[b] for b in t) for t in TOKENS]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "kimi-k2",
        "tokenizer.ggml.tokens": [*tokens, "[BOS]", "<|end_of_msg|>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3],
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }
    write_ranks(tmp_path)
    source = make_source(metadata, [tmp_path / "m.gguf"])
    tokenizer = load_tokenizer(source, n_vocab=len(tokens) + 2)
    assert tokenizer.origin.endswith("tiktoken.model")
    assert tokenizer.eog_ids == {len(tokens) + 1}
    # Of another model: refused, since it only lies there.
    write_ranks(tmp_path, tokens=[*TOKENS[:-2], TOKENS[-1], TOKENS[-2]])
    with pytest.raises(TokenizerError, match="another vocabulary"):
        load_tokenizer(source, n_vocab=len(tokens) + 2)


def test_order_of_places(tmp_path, make_source, make_metadata):
    folder = tmp_path / "model"
    inside = write_ranks(folder, "x.tiktoken").rename(folder / "x.tiktoken")
    model = [folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf"]
    bare, own = make_source({}, model), make_source(make_metadata(), model)
    assert load_tokenizer(bare).origin == str(inside)
    other = write_ranks(tmp_path / "other")
    assert load_tokenizer(own, other).origin == str(other)
    assert load_tokenizer(own, other.parent).origin == str(other)
    inside.unlink()
    assert load_tokenizer(own).origin == "metadata"
    with pytest.raises(TokenizerError, match="no vocabulary"):
        load_tokenizer(bare)
    below = write_ranks(folder / "tokenizer")
    assert load_tokenizer(bare).origin == str(below)
    assert load_tokenizer(own).origin == "metadata"


def test_two_equally_good_ones_are_listed(tmp_path, make_source):
    folder = tmp_path / "model"
    a, b = write_ranks(folder), write_ranks(folder, "b.tiktoken")
    source = make_source({}, [folder / "m.gguf"])
    with pytest.raises(TokenizerError, match="equally good") as caught:
        load_tokenizer(source)
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)
    a.unlink()
    b.unlink()
    write_ranks(folder / "one")
    write_ranks(folder / "two")
    with pytest.raises(TokenizerError, match="equally good"):
        load_tokenizer(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ranks are not 0"),
        (b"YQ== 0\nYg== 2\n", "ranks are not 0"),
        (b"YQ== 0\nYg== 0\n", "rank 0 twice"),
        (b"YQ== 0\nYQ== 1\n", "same token with two ranks"),
        (b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00", "line 2 is not base64"),
        (b"YQ== zero\n", "line 1 is not base64"),
    ],
)
def test_other_files_are_refused(tmp_path, make_source, content, message):
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(make_source({}), tmp_path)


def test_a_vocabulary_too_large_for_the_model(tmp_path, make_source):
    write_ranks(tmp_path)
    with pytest.raises(TokenizerError, match="belongs to another model"):
        load_tokenizer(make_source({}), tmp_path, n_vocab=100)
    write_names(tmp_path, added_tokens_decoder={"3": {"content": "[BOS]"}})
    with pytest.raises(TokenizerError, match="names the special token 3"):
        load_tokenizer(make_source({}), tmp_path, n_vocab=N_VOCAB)
    write_names(tmp_path, added_tokens_decoder={"x": 1})
    with pytest.raises(TokenizerError, match="malformed"):
        load_tokenizer(make_source({}), tmp_path, n_vocab=N_VOCAB)


def test_its_chat_template_comes_along(tmp_path, make_source):
    write_ranks(tmp_path)
    write_names(tmp_path, chat_template="{{ messages[0].content }}")
    assert load_tokenizer(make_source({}), tmp_path).chat_template == "{{ messages[0].content }}"
