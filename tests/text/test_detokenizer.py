"""Pieces joined are the decoded whole; stop strings are found wherever the tokens' borders lie."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aprefetch.errors import InvalidRequestError
from aprefetch.text.detokenizer import Detokenizer
from aprefetch.text.tokenizer import Tokenizer

SHARED = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def drain(detokenizer: Detokenizer, ids: list[int]) -> tuple[str, bool]:
    pieces = [detokenizer.push(i)[0] for i in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.flush() == ""
    return "".join(pieces), detokenizer.stopped


def cut_at_stop(text: str, stops: list[str]) -> str:
    """Character by character: the slowest and plainest reference."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@SHARED
@given(ids=st.lists(st.integers(0, 260), max_size=40), skip=st.booleans())
def test_joined_pieces_equal_decode_for_any_bytes(
    byte_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(byte_tokenizer, skip_special=skip)
    assert drain(detokenizer, ids)[0] == byte_tokenizer.decode(ids, skip_special=skip)


@SHARED
@given(ids=st.lists(st.integers(0, 1023), max_size=60))
def test_joined_pieces_equal_decode_on_a_real_vocabulary(
    oracle_tokenizer: Tokenizer, ids: list[int]
) -> None:
    detokenizer = Detokenizer(oracle_tokenizer, skip_special=False)
    assert drain(detokenizer, ids)[0] == oracle_tokenizer.decode(ids)


@SHARED
@given(text=st.text(st.sampled_from("ab 🙂你é\u200d👩\n"), max_size=30))
def test_characters_over_several_tokens_come_whole(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text, add_special=False)
    detokenizer = Detokenizer(byte_tokenizer)
    pieces = [detokenizer.push(i)[0] for i in ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert detokenizer.flush() == ""


@SHARED
@given(
    text=st.text(st.sampled_from("ab🙂"), max_size=25),
    stops=st.lists(st.text(st.sampled_from("ab🙂"), min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_against_a_reference(
    byte_tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    ids = byte_tokenizer.encode(text, add_special=False)
    got, stopped = drain(Detokenizer(byte_tokenizer, stops), ids)
    assert got == cut_at_stop(text, stops)
    assert stopped == any(s in text for s in stops)


@SHARED
@given(
    ids=st.lists(st.integers(0, 260), max_size=30),
    stops=st.lists(st.sampled_from(["\ufffd", "ab", "b\ufffd", "é", "Ã"]), max_size=2),
)
def test_stop_strings_in_invalid_bytes(
    byte_tokenizer: Tokenizer, ids: list[int], stops: list[str]
) -> None:
    got, _ = drain(Detokenizer(byte_tokenizer, stops), ids)
    assert got == cut_at_stop(byte_tokenizer.decode(ids, skip_special=True), stops)


def test_the_stop_is_not_printed_and_what_precedes_it_is(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokenizer, ["END"])
    ids = byte_tokenizer.encode("xEN EEND rest", add_special=False)
    results = [detokenizer.push(i) for i in ids]
    assert "".join(text for text, _ in results) == "xEN E"
    assert [stopped for _, stopped in results].index(True) == 7
    assert detokenizer.flush() == ""


def test_held_text_comes_with_flush(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokenizer, ["\n\n"])
    assert detokenizer.push(ord("\n") + 0) is not None
    fresh = Detokenizer(byte_tokenizer, ["zz"])
    (z,) = byte_tokenizer.encode("z", add_special=False)
    assert fresh.push(z) == ("", False)
    assert fresh.flush() == "z"


def test_a_dangling_tail_is_flushed_once(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("🙂", add_special=False)
    detokenizer = Detokenizer(byte_tokenizer)
    assert [detokenizer.push(i)[0] for i in ids[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_control_tokens_are_hidden_and_user_defined_ones_are_not(
    oracle_tokenizer: Tokenizer, oracle: dict[str, Any]
) -> None:
    ids = oracle_tokenizer.encode("<｜User｜>Hello<think>")
    assert drain(Detokenizer(oracle_tokenizer), ids)[0] == "Hello<think>"
    assert drain(Detokenizer(oracle_tokenizer, skip_special=False), ids)[0] == (
        "<｜begin▁of▁sentence｜><｜User｜>Hello<think>"
    )


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], [None]])
def test_bad_stop_strings(byte_tokenizer: Tokenizer, stop: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Detokenizer(byte_tokenizer, stop)
    assert caught.value.param == "stop"


def test_an_id_outside_the_vocabulary(byte_tokenizer: Tokenizer) -> None:
    for bad in (-1, 261):
        with pytest.raises(InvalidRequestError):
            Detokenizer(byte_tokenizer).push(bad)
