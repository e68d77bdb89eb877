"""A prompt that extends an earlier one continues from the kept state, and no token changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import aprefetch
from aprefetch import Runtime

GREEDY = {"temperature": 0, "ignore_eos": True}
KEEP = {"prefix_budget": "64MiB"}


@pytest.fixture(scope="module")
def model(oracle_dir: Path) -> Path:
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model: Path) -> dict[str, Any]:
    return json.loads(model.with_suffix(".json").read_text())


async def turns(rt: Runtime, facts: dict[str, Any], n: int) -> list[tuple[list[int], Any, int]]:
    """A conversation in token ids; answers, usages and prompt tokens run per turn."""
    text = facts["prompts"]["p300"]["ids"]
    ids, out = text[:9], []
    for turn in range(n):
        sampling = GREEDY if turn % 2 else {"seed": turn, "ignore_eos": True}
        done = await rt.generate(ids, max_tokens=6, **sampling)
        out.append((done.token_ids, done.usage, done.stats.prompt_tokens))
        ids = [*ids, *done.token_ids, *text[9 + 7 * turn : 16 + 7 * turn]]
    return out


async def test_ten_turns_run_only_what_is_new(model, facts) -> None:
    async with Runtime.open(model) as rt:
        want = await turns(rt, facts, 10)
        assert all(usage.reused_tokens == 0 for _, usage, _ in want)
    async with Runtime.open(model, chunk_tokens=5, **KEEP) as rt:
        got = await turns(rt, facts, 10)
        assert [ids for ids, _, _ in got] == [ids for ids, _, _ in want]
        for turn, (_, usage, n_run) in enumerate(got):
            new = 9 if turn == 0 else 1 + 7  # the answer's last token was sampled, never run
            assert n_run == new
            assert usage.reused_tokens == usage.prompt_tokens - new
        assert rt.stats().reused_tokens == sum(usage.reused_tokens for _, usage, _ in got)
        assert rt.stats().memory["kept_states_bytes"] > 0


async def test_branches_and_neighbours(model, facts) -> None:
    """Two continuations of one beginning at the same time, beside a stranger."""
    text = facts["prompts"]["p150"]["ids"]
    prompts = [text[:60] + tail for tail in ([5, 6, 7], [9], text[60:90])] + [text[::-1][:50]]
    async with Runtime.open(model) as rt:
        want = [(await rt.generate(p, max_tokens=5, **GREEDY)).token_ids for p in prompts]
    async with Runtime.open(model, **KEEP) as rt:
        await rt.generate(text[:60], max_tokens=1, **GREEDY)
        done = await asyncio.gather(*(rt.generate(p, max_tokens=5, **GREEDY) for p in prompts))
        assert [d.token_ids for d in done] == want
        assert [d.usage.reused_tokens for d in done] == [60, 60, 60, 0]
        again = await rt.generate(prompts[0], max_tokens=5, **GREEDY)
        assert again.token_ids == want[0]
        assert again.usage.reused_tokens == 60  # a token is left to be run


async def test_cancelled_and_scored_ones_do_not_disturb(model, facts) -> None:
    text = facts["prompts"]["p40"]["ids"]
    async with Runtime.open(model, **KEEP) as rt:
        async with rt.stream(text, max_tokens=90, **GREEDY) as stream:
            async for event in stream:
                if event.index == 3:
                    break
            ids = stream.token_ids
        scored = await rt.score(text)
        assert scored.stats.prompt_tokens == len(text)
        done = await rt.generate([*text, *ids[:3]], max_tokens=3, **GREEDY)
        assert done.token_ids == facts["greedy"]["p40"][3:6]
        assert done.usage.reused_tokens == len(text)  # kept at the prompt's end


async def test_later_runs_find_states_on_disk(model, facts, tmp_path, caplog) -> None:
    text, folder = facts["prompts"]["p40"]["ids"], tmp_path / "states"
    options = {**KEEP, "prefix_folder": str(folder), "prefix_disk_budget": "32MiB"}
    async with Runtime.open(model, **options) as rt:
        first = await rt.generate(text, max_tokens=6, **GREEDY)
    longer = [*text, *first.token_ids, 3, 4, 5]
    async with Runtime.open(model) as rt:
        want = await rt.generate(longer, max_tokens=6, **GREEDY)
    files = list(folder.iterdir())
    assert files
    async with Runtime.open(model, **options) as rt:
        done = await rt.generate(longer, max_tokens=6, **GREEDY)
        assert done.token_ids == want.token_ids
        assert done.usage.reused_tokens == len(text) + 5
    async with Runtime.open(model, kernels="reference", **options) as rt:  # other bits
        assert (await rt.generate(longer, max_tokens=1)).usage.reused_tokens == 0
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    (folder / "stranger.apstate").write_text("hello")
    async with Runtime.open(model, **options) as rt:
        done = await rt.generate(longer, max_tokens=6, **GREEDY)
        assert done.token_ids == want.token_ids
        assert done.usage.reused_tokens == 0
    assert "not used" in caplog.text
    assert (folder / "stranger.apstate").exists()


async def test_reasoning_that_the_next_turn_leaves_out(model) -> None:
    """The state is kept where the next prompt still agrees: before the answer is opened."""
    messages = [{"role": "user", "content": "Hello there, how are you today?"}]
    thinking = {"chat_options": {"thinking": True}, "max_tokens": 3}
    async with Runtime.open(model, **KEEP) as rt:
        first = await rt.generate(messages, **GREEDY, chat_options={"thinking": True}, max_tokens=3)
        messages += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "So?"}]
        second = await rt.generate(messages, **GREEDY, **thinking)
        assert second.usage.reused_tokens == first.usage.prompt_tokens - 2
    async with Runtime.open(model) as rt:
        want = await rt.generate(messages, **GREEDY, **thinking)
        assert second.token_ids == want.token_ids


async def test_options(model, tmp_path) -> None:
    for wrong, words in (
        ({"prefix_budget": "auto"}, "prefix_budget"),
        ({"prefix_folder": str(tmp_path)}, "prefix_budget above 0"),
        ({"prefix_budget": 1, "prefix_folder": "/proc/none"}, "prefix_folder"),
        ({"prefix_budget": 1, "prefix_disk_budget": "lots"}, "prefix_disk_budget"),
    ):
        with pytest.raises(aprefetch.ConfigError, match=words):
            await Runtime.open(model, **wrong)
