"""Vocabularies: the recorded token ids, the places they come from, and what is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprefetch.errors import InvalidRequestError, TokenizerError
from aprefetch.text import pretokenizers
from aprefetch.text.byte_alphabet import CHAR_OF_BYTE, spelled_bytes
from aprefetch.text.tokenizer import Tokenizer
from aprefetch.text.vocab import load_tokenizer

BOS = "<｜begin▁of▁sentence｜>"


# ---- recorded ids


@pytest.mark.parametrize("add_special", [False, True])
@pytest.mark.parametrize("parse_special", [False, True])
def test_oracle_cases(
    oracle: dict[str, Any], oracle_tokenizer: Tokenizer, add_special: bool, parse_special: bool
) -> None:
    key = f"add_special={add_special:d},parse_special={parse_special:d}"
    for case in oracle["tokenizer_tests"]:
        ids = oracle_tokenizer.encode(case["text"], add_special, parse_special)
        assert ids == case["ids"][key], case["text"]
        assert oracle_tokenizer.decode(ids, skip_special=not parse_special).endswith(
            case["text"] if not add_special else ""
        )


def test_oracle_prompts(oracle: dict[str, Any], oracle_tokenizer: Tokenizer) -> None:
    texts = {k: p for k, p in oracle["prompts"].items() if p["source"] != "raw ids"}
    assert len(texts) == 2
    for prompt in texts.values():
        assert oracle_tokenizer.encode(prompt["source"])[: prompt["n"]] == prompt["ids"]
    nll = oracle_tokenizer.encode(oracle["nll_text"])
    assert nll[: len(oracle["nll_ids"])] == oracle["nll_ids"]


def test_embedded_goldens(goldens: dict[str, Any], embedded_tokenizer: Tokenizer) -> None:
    assert len(goldens["greedy"]) == 5
    for golden in goldens["greedy"]:
        assert embedded_tokenizer.encode(golden["prompt"]) == golden["prompt_ids"]
        assert embedded_tokenizer.encode_prompt(golden["prompt"]) == golden["prompt_ids"]
        assert embedded_tokenizer.decode(golden["ids"]) == golden["text"]


def test_special_ids(embedded_tokenizer: Tokenizer, oracle_tokenizer: Tokenizer) -> None:
    assert (embedded_tokenizer.bos_id, embedded_tokenizer.eos_id) == (0, 1)
    assert embedded_tokenizer.eog_ids == {1}
    assert embedded_tokenizer.n_vocab == 4096
    assert {0, 1, 2} <= embedded_tokenizer.special_ids
    assert oracle_tokenizer.token_text(0) == BOS
    assert oracle_tokenizer.token_id("<think>") == 981
    assert oracle_tokenizer.token_id("Hello") is None


# ---- BOS, markers, bytes


def test_bos_exactly_once_in_prompts(embedded_tokenizer: Tokenizer) -> None:
    for text in ("Hi", BOS + "Hi"):
        ids = embedded_tokenizer.encode_prompt(text)
        assert ids.count(0) == 1 and ids[0] == 0
    assert embedded_tokenizer.encode(BOS + "Hi").count(0) == 2
    assert embedded_tokenizer.encode_prompt("") == [0]


def test_no_bos_where_the_model_wants_none(make_metadata: Any, make_source: Any) -> None:
    tokenizer = load_tokenizer(make_source(make_metadata(add_bos_token=False)))
    assert 257 not in tokenizer.encode_prompt("ab")
    assert tokenizer.encode_prompt("<s>ab") == [257, 256]


def test_add_eos_is_for_encode_only(make_metadata: Any, make_source: Any) -> None:
    tokenizer = load_tokenizer(make_source(make_metadata(add_eos_token=True)))
    assert tokenizer.encode("ab") == [257, 256, 258]
    assert tokenizer.encode_prompt("ab") == [257, 256]


def test_end_of_generation(make_metadata: Any, make_source: Any) -> None:
    tokenizer = load_tokenizer(make_source(make_metadata(eot_token_id=5, eom_token_id=6)))
    assert tokenizer.eog_ids == {258, 260, 5, 6}


def test_markers_longest_first(make_metadata: Any, make_source: Any) -> None:
    metadata = make_metadata(
        tokens=[*CHAR_OF_BYTE, "<a>", "<a><b>", "<b>"], token_type=[1] * 256 + [3, 3, 4],
        merges=[], bos_token_id=None, eos_token_id=None, add_bos_token=None,
    )  # fmt: skip
    tokenizer = load_tokenizer(make_source(metadata))
    assert tokenizer.encode("<a><b><a><a><b>") == [257, 256, 257]
    assert tokenizer.encode("<a><b>", parse_special=False)[-1] == 258


def test_round_trip_of_any_text(byte_tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    for _ in range(50):
        chars = (chr(draw.choice([draw.randrange(32, 0xD800), draw.randrange(0x1F300, 0x1F700)]))
                 for _ in range(draw.randrange(40)))  # fmt: skip
        text = "".join(chars)
        assert byte_tokenizer.decode(byte_tokenizer.encode(text, add_special=False)) == text


def test_byte_alphabet() -> None:
    assert len(set(CHAR_OF_BYTE)) == 256
    assert all(spelled_bytes(char) == bytes([byte]) for byte, char in enumerate(CHAR_OF_BYTE))
    assert spelled_bytes("Ġhe") == b" he"
    assert spelled_bytes("\u00a0") == b"\xc2\xa0"
    assert spelled_bytes("｜") == "｜".encode()


def test_a_megabyte(embedded_tokenizer: Tokenizer) -> None:
    text = ("Once upon a time, 今天 🙂\n" * 50_000)[:1_000_000]
    assert embedded_tokenizer.decode(embedded_tokenizer.encode(text, add_special=False)) == text
    for run in (" ", "a", "<"):
        ids = embedded_tokenizer.encode(run * 200_000, add_special=False)
        assert embedded_tokenizer.decode(ids) == run * 200_000


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", None, 3, b"ab"])
def test_text_that_is_none(byte_tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        byte_tokenizer.encode(text)
    assert caught.value.param == "prompt"


def test_ids_outside(byte_tokenizer: Tokenizer) -> None:
    for bad in (-1, 261, 1 << 40):
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            byte_tokenizer.decode([bad])


def test_bytes_without_a_token(make_metadata: Any, make_source: Any) -> None:
    tokenizer = load_tokenizer(
        make_source(
            make_metadata(
                tokens=["a", "b", "ab", "<s>"],
                token_type=[1, 1, 1, 3],
                bos_token_id=3,
                eos_token_id=None,
            )
        )  # fmt: skip
    )
    assert tokenizer.encode("aab") == [3, 0, 2]
    with pytest.raises(InvalidRequestError, match="0x63"):
        tokenizer.encode("abc")


# ---- pre-tokenizers


@pytest.mark.parametrize("name", pretokenizers.known_names())
def test_every_split_compiles_and_loses_nothing(
    name: str, make_metadata: Any, make_source: Any
) -> None:
    tokenizer = load_tokenizer(make_source(make_metadata(pre=name)))
    text = " It's 12345 naïve  words,\r\n\n\tcamelCase 今天カタ é\u0301 🙂 + == ab\u00a0 "
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("joyai-llm", "12345.net .a 今天ab", ["123", "45", ".net", " .", "a", " ", "今天", "ab"]),
        ("qwen2", "ab12 I'M", ["ab", "1", "2", " I", "'M"]),
        ("llama-bpe", "1234 a\n\n b", ["123", "4", " a", "\n\n", " b"]),
        ("gpt-4o", "helloWorld's a/", ["hello", "World's", " a", "/"]),
        ("kimi-k2", "今天好ab helloWorld", ["今天好", "ab", " hello", "World"]),
        ("qwen35", "e\u0301a b", ["e\u0301a", " b"]),
        ("gpt-2", "a  b's", ["a", " ", " b", "'s"]),
        ("deepseek-llm", "a 12 b今", ["a", " ", "12", " b", "今"]),
    ],
)
def test_splits(name: str, text: str, words: list[str]) -> None:
    from tokenizers import Regex, pre_tokenizers

    steps = [
        pre_tokenizers.Split(Regex(p), "isolated") for p in pretokenizers.lookup(name).patterns
    ]
    got = [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]
    assert got == words


def test_an_unknown_split_is_an_error_that_lists_the_known() -> None:
    for bad in ("default", "nonsense", "", 3, None, ["qwen2"]):
        with pytest.raises(TokenizerError, match="joyai-llm"):
            pretokenizers.lookup(bad)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"model": 3}, "not supported"),
        ({"pre": None}, "tokenizer.ggml.pre"),
        ({"pre": "nonsense"}, "nonsense"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "no pair"),
        ({"merges": ["a zz"]}, "do not fit"),
        ({"merges": "a b"}, "not a list"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "empty"),
        ({"tokens": [1, 2]}, "no strings"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "twice"),
        ({"token_type": None}, "token_type is missing"),
        ({"token_type": [1, 2]}, "2 elements"),
        ({"token_type": ["x"]}, "integers"),
        ({"token_type": [9] * 261}, "unknown values"),
        ({"bos_token_id": 261}, "outside"),
        ({"bos_token_id": -1}, "outside"),
        ({"eos_token_id": "1"}, "not an integer"),
        ({"eos_token_id": True}, "not an integer"),
        ({"bos_token_id": None}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "not a boolean"),
    ],
)
def test_inconsistent_metadata(
    changes: dict[str, Any], words: str, make_metadata: Any, make_source: Any
) -> None:
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(make_source(make_metadata(**changes)))


def test_a_vocabulary_of_another_size(make_metadata: Any, make_source: Any) -> None:
    with pytest.raises(TokenizerError, match="300"):
        load_tokenizer(make_source(make_metadata()), n_vocab=300)


def test_ids_only(make_source: Any) -> None:
    metadata = {"tokenizer.ggml.model": "none", "tokenizer.ggml.eos_token_id": 7}
    tokenizer = load_tokenizer(make_source(metadata), n_vocab=64)
    assert tokenizer.n_vocab == 64 and tokenizer.eog_ids == {7}
    assert tokenizer.decode([1, 2, 3]) == ""
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(TokenizerError, match="token ids"):
            encode("Hi")


def test_ranks_stand_for_merges_in_kimi_k2(make_metadata: Any, make_source: Any) -> None:
    tokens = [*CHAR_OF_BYTE, "bc", "abc", "ab", "[EOS]"]
    metadata = make_metadata(
        pre="kimi-k2", merges=None, tokens=tokens, token_type=[1] * 259 + [3],
        bos_token_id=None, eos_token_id=None, add_bos_token=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(make_source(metadata))
    # "bc" has the lowest rank, so it is joined first: never "ab" + "c".
    assert tokenizer.encode("abc abd") == [257, ord(" "), 258, ord("d")]
    assert tokenizer.eog_ids == {259}


# ---- places


def byte_json(extra: tuple[str, ...] = ("<s>", "</s>", "<think>", "<|eot_id|>")) -> dict[str, Any]:
    vocab = {token: i for i, token in enumerate([*CHAR_OF_BYTE, "ab"])}
    added = [
        {"id": 257 + i, "content": content, "special": content != "<think>", "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for i, content in enumerate(extra)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]},
    }  # fmt: skip


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "модель.gguf"
    path.parent.mkdir()
    path.touch()
    return path


def test_from_metadata_alone(model_file: Path, make_metadata: Any, make_source: Any) -> None:
    assert load_tokenizer(make_source(make_metadata(), [model_file])).origin == "metadata"


def test_sibling_before_metadata(model_file: Path, make_metadata: Any, make_source: Any) -> None:
    sibling = write(model_file.with_name("tokenizer.json"), byte_json())
    tokenizer = load_tokenizer(make_source(make_metadata(), [model_file]), n_vocab=261)
    assert tokenizer.origin == str(sibling)
    assert tokenizer.encode("<s>ab<think>") == [257, 257, 256, 259]
    assert tokenizer.eog_ids == {258, 260}
    assert tokenizer.decode([257, 256, 259], skip_special=True) == "ab<think>"


def test_option_before_sibling(
    model_file: Path, tmp_path: Path, make_metadata: Any, make_source: Any
) -> None:
    write(model_file.with_name("tokenizer.json"), byte_json())
    chosen = write(tmp_path / "other" / "tokenizer.json", byte_json())
    source = make_source(make_metadata(), [model_file])
    assert load_tokenizer(source, chosen).origin == str(chosen)
    assert load_tokenizer(source, str(chosen.parent)).origin == str(chosen)
    assert load_tokenizer(source, model_file).origin == "metadata"


def test_settings_beside_the_json(tmp_path: Path, make_source: Any) -> None:
    path = write(tmp_path / "tokenizer.json", byte_json())
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    write(tmp_path / "tokenizer_config.json", settings | {"chat_template": "{{ bos_token }}"})
    tokenizer = load_tokenizer(make_source({}), path, n_vocab=300)
    assert tokenizer.encode("ab") == [257, 256]
    assert tokenizer.n_vocab == 300 and tokenizer.decode([299]) == ""
    assert tokenizer.chat_template == "{{ bos_token }}"


def test_two_equally_good(model_file: Path, make_metadata: Any, make_source: Any) -> None:
    write(model_file.with_name("tokenizer.json"), byte_json())
    write(model_file.with_name("b.tokenizer.json"), byte_json())
    with pytest.raises(TokenizerError, match=r"b\.tokenizer\.json.*tokenizer\.json"):
        load_tokenizer(make_source(make_metadata(), [model_file]))
    other = write(model_file.parents[1] / "shards" / "tokenizer.json", byte_json())
    model_file.with_name("b.tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="equally good"):
        load_tokenizer(make_source(make_metadata(), [model_file, other.with_name("2.gguf")]))


def test_none_at_all(model_file: Path, make_source: Any) -> None:
    with pytest.raises(TokenizerError, match="no vocabulary"):
        load_tokenizer(make_source({}, [model_file]))
    for missing in (model_file.parent, model_file.with_name("absent")):
        with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
            load_tokenizer(make_source({}, [model_file]), missing)


def test_a_sibling_of_another_model(model_file: Path, make_metadata: Any, make_source: Any) -> None:
    sibling = write(model_file.with_name("tokenizer.json"), byte_json(("<x>", "</s>")))
    source = make_source(make_metadata(), [model_file])
    with pytest.raises(TokenizerError, match="another vocabulary"):
        load_tokenizer(source)
    with pytest.raises(TokenizerError, match="embedding rows"):
        load_tokenizer(source, sibling, n_vocab=200)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "BPE", "vocab": [], "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 1 << 30}, "merges": []}},
        {"model": None},
        {"decoder": {"type": "Metaspace"}},
        {"decoder": None},
        {"pre_tokenizer": {"type": "nonsense"}},
        {"added_tokens": [{"id": 300, "content": "x", "lstrip": True}]},
        {"added_tokens": [3]},
    ],
)
def test_broken_json_vocabularies(tmp_path: Path, make_source: Any, change: dict[str, Any]) -> None:
    path = write(tmp_path / "tokenizer.json", byte_json() | change)
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        load_tokenizer(make_source({}), path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_files_that_are_not_json(tmp_path: Path, make_source: Any, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        load_tokenizer(make_source({}), path)


def test_both_ways_give_the_same_ids(
    tmp_path: Path, make_metadata: Callable[..., dict[str, Any]], make_source: Any
) -> None:
    metadata = make_metadata(pre="gpt-2")
    path = write(tmp_path / "tokenizer.json", byte_json())
    one, two = load_tokenizer(make_source(metadata)), load_tokenizer(make_source(metadata), path)
    text = "abab cab's <s> 12 \n\n 今天 <think>🙂"
    for flags in ((True, True), (True, False), (False, True), (False, False)):
        assert one.encode(text, *flags) == two.encode(text, *flags)


def test_imports_stay_lazy() -> None:
    code = (
        "import sys\n"
        "from aprefetch.text import chat_template, detokenizer, vocab\n"
        "loaded = {'tokenizers', 'jinja2', 'torch'} & set(sys.modules)\n"
        "sys.exit(repr(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
