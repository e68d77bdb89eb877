"""Rows of the contract that only show through the whole: fallback, faults, counters, trace."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from runtime_parts import full_budgets, minimum_budgets, parts

import aprefetch
from aprefetch.errors import AprefetchError, ReadError
from aprefetch.pipeline.io.wrappers import DelayFiles, FaultFiles, RecordingFiles
from aprefetch.trace import validate_trace

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(oracle_dir):
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model):
    return json.loads(model.with_suffix(".json").read_text())


def small(model: Path, n: int = 8) -> dict[str, int]:
    return {name: n * least for name, least in minimum_budgets(model).items()}


# -- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["open", "first read"])
async def test_r2_direct_reads_refused(model, facts, at):
    """Buffered reads instead: counted, and the tokens are right."""
    files = FaultFiles()
    if at == "open":
        files.refuse_open(errno.EINVAL)
    else:
        files.fail(errno.EINVAL, times=-1, direct=True)
    with parts(files=files):
        async with aprefetch.Runtime.open(model) as rt:
            done = await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=6, **GREEDY)
            assert done.token_ids == facts["greedy"]["p7"][:6]
            assert rt.stats().fallback_count == 1


@pytest.mark.parametrize("at", ["open", "first read"])
async def test_r2_strict_mode_refuses(model, at):
    files = FaultFiles()
    if at == "open":
        files.refuse_open(errno.EINVAL)
    else:
        files.fail(errno.EINVAL, times=-1, direct=True)
    with parts(files=files), pytest.raises(ReadError, match=r"tiny-deepseek4.*gguf"):
        async with aprefetch.Runtime.open(model, strict_direct=True) as rt:
            await rt.generate([1, 2, 3], max_tokens=2)


async def test_r1_reads_are_direct_and_aligned(model, facts):
    log = RecordingFiles()
    with parts(files=log):
        async with aprefetch.Runtime.open(model, **small(model)) as rt:
            await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=4, **GREEDY)
            stats = rt.stats()
    assert log.opens == [(model, True)]
    assert all(r.direct and r.address % 4096 == r.offset % 4096 == 0 for r in log.reads)
    assert stats.reads == len(log.reads)
    assert stats.bytes_read == sum(r.n_bytes for r in log.reads)
    assert stats.max_in_flight >= log.max_in_flight > 0


@pytest.mark.parametrize("kind", ["short reads", "interrupted", "EIO, then well"])
async def test_r5_faults_that_pass_change_nothing(model, facts, kind):
    files = FaultFiles()
    if kind == "short reads":
        files.shorten(8192, times=40)
    else:
        files.fail(errno.EINTR if kind == "interrupted" else errno.EIO, times=1, at_read=5)
    with parts(files=files):
        async with aprefetch.Runtime.open(model) as rt:
            done = await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=6, **GREEDY)
            stats = rt.stats()
    assert done.token_ids == facts["greedy"]["p7"][:6]
    assert files.n_struck > 0
    assert stats.short_reads + stats.io_retries > 0
    assert stats.io_errors == 0


async def test_f1_an_io_error_ends_one_request_and_the_next_is_right(model, facts):
    """The second of two streams fails; the first goes on; then all is well again."""
    files = FaultFiles()
    wanted = facts["greedy"]["p40"][:20]
    with parts(files=files):
        async with aprefetch.Runtime.open(model, lookahead="off", **small(model, 6)) as rt:
            good = rt.stream(facts["prompts"]["p40"]["ids"], max_tokens=20, **GREEDY)
            events = [await anext(good) for _ in range(3)]
            files.fail(errno.EIO, times=-1)
            with pytest.raises(ReadError) as caught:
                await rt.generate(facts["prompts"]["p300"]["ids"], max_tokens=5, **GREEDY)
            assert caught.value.key is not None
            assert caught.value.errno == errno.EIO
            files.lift()
            with_error = None
            try:
                events += [event async for event in good]
            except ReadError as error:  # it may have wanted one of the failing experts too
                with_error = error
            await good.aclose()
            assert [event.token_id for event in events] == wanted[: len(events)]
            assert with_error is not None or len(events) == 20
            again = await rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=20, **GREEDY)
            assert again.token_ids == wanted
            assert rt.stats().io_errors > 0


# -- counters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ram_tier", ["inclusive", "exclusive"])
async def test_k1_identities(model, facts, ram_tier):
    async with aprefetch.Runtime.open(model, ram_tier=ram_tier, **small(model)) as rt:
        await rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=30, **GREEDY)
        await asyncio.sleep(0.05)
        s = rt.stats()
    assert s.hits_ram + s.misses_ram == s.misses_device
    assert s.guesses_issued == s.guesses_useful + s.guesses_wasted
    n_bytes = 3 * 128 * 256 // 32 * 17  # three roles of 128 x 256 MXFP4 weights
    assert s.bytes_uploaded == s.uploads * n_bytes
    assert s.bytes_demoted == s.demotions * n_bytes
    assert s.prompt_tokens == 40
    assert s.output_tokens == 30
    assert set(s.routed_calls.values()) == {(40 + 29) * 4}
    out = s.to_dict()
    assert json.loads(json.dumps(out)) == out
    assert out["hits"] + out["misses"] == s.hits_device + s.misses_device


async def test_k2_every_counter_moves(model, facts):
    """No counter is a constant: together these runs move each one."""
    moved: set[str] = set()

    def note(stats: aprefetch.Stats) -> None:
        for field in dataclasses.fields(stats):
            if getattr(stats, field.name):
                moved.add(field.name)

    files = FaultFiles(DelayFiles(None, 0.001))
    files.refuse_open()
    files.shorten(8192, times=5)
    files.fail(errno.EIO, times=1, at_read=40)
    files.fail(errno.ENXIO, times=1, at_read=900)
    with parts(files=files):
        async with aprefetch.Runtime.open(
            model, **{n: 2 * b for n, b in minimum_budgets(model).items()}
        ) as rt:
            for _ in range(2):
                try:
                    await rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=10, **GREEDY)
                except ReadError:
                    break
            note(rt.stats())
    ram = {**minimum_budgets(model), "ram_budget": full_budgets(model)["ram_budget"] // 2}
    for budgets in (ram, {**ram, "ram_tier": "exclusive"}, small(model, 12)):
        async with aprefetch.Runtime.open(model, lookahead_depth=3, **budgets) as rt:
            await rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=30, **GREEDY)
            note(rt.stats())
    options = {"lookahead": "off", "prefix_budget": "64MB"}
    async with aprefetch.Runtime.open(model, **options, **small(model)) as rt:
        done = await rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=2, **GREEDY)
        again = [*facts["prompts"]["p40"]["ids"], *done.token_ids, 7]
        await rt.generate(again, max_tokens=2, **GREEDY)
        note(rt.stats())
    async with aprefetch.Runtime.open(model, prefix_budget="16MiB") as rt:
        ids = facts["prompts"]["p40"]["ids"]
        done = await rt.generate(ids, max_tokens=2, **GREEDY)
        await rt.generate([*ids, *done.token_ids, 5], max_tokens=2, **GREEDY)
        note(rt.stats())
    names = {field.name for field in dataclasses.fields(aprefetch.Stats)}
    assert names - moved == {"duplicate_reads"}, "only this one must stay 0"


async def test_k3_a_stall_is_counted_once_with_its_layer(model, facts):
    """One expert's file range is slow: its layer stalls for about as long as was added."""
    source = aprefetch.inspect(model)
    slow = next(t for t in source.tensors if t.name == "blk.5.ffn_up_exps.weight")
    span = range(slow.offset, slow.offset + slow.n_bytes)
    delay_s = 0.05

    def wait(path: Path, offset: int, length: int) -> float:
        return delay_s if offset < span.stop and span.start < offset + length else 0.0

    with parts(files=DelayFiles(None, wait)):
        async with aprefetch.Runtime.open(
            model, lookahead="off", queue_depth=16, **full_budgets(model)
        ) as rt:
            await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=2, **GREEDY)
            stats = rt.stats()
    in_layer = stats.stall_ns_by_layer[5]
    assert in_layer >= 0.9 * delay_s * 1e9
    assert stats.stall_ns == sum(stats.stall_ns_by_layer.values())
    assert in_layer == max(stats.stall_ns_by_layer.values())


async def test_k4_stalls_and_named_spans_account_for_a_tokens_time(model, facts, tmp_path):
    """With 20 ms added to each read, waits hold nearly all of it, and little stays unnamed."""
    path = tmp_path / "trace.json"
    with parts(files=DelayFiles(None, 0.02)):
        async with aprefetch.Runtime.open(
            model, trace=True, queue_depth=1, lookahead="off", **small(model, 2)
        ) as rt:
            await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=3, **GREEDY)
            await rt.export_trace(path)
            stats = rt.stats()
    trace = json.loads(path.read_text())
    assert validate_trace(trace) == []
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    total = {}
    for span in spans:
        total[span["cat"]] = total.get(span["cat"], 0.0) + span["dur"]
    steps = sum(s["dur"] for s in spans if s["name"].startswith("step"))
    named = total["wait"] + total["compute"] + total.get("router", 0.0)
    added_us = stats.reads * 0.02e6
    assert total["wait"] >= 0.9 * added_us
    assert named >= 0.95 * steps


async def test_u3_hits_compute_before_the_last_miss_lands(model, facts, tmp_path):
    path = tmp_path / "trace.json"
    ids = facts["prompts"]["p40"]["ids"]
    with parts(files=DelayFiles(None, 0.003)):
        async with aprefetch.Runtime.open(
            model, trace=True, lookahead="off", **small(model, 12)
        ) as rt:
            done = await rt.generate(ids, max_tokens=12, **GREEDY)
            await rt.export_trace(path)
    assert done.token_ids == facts["greedy"]["p40"][:12]
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    waits = [s for s in spans if s["cat"] == "wait"]
    experts = [s for s in spans if s["cat"] == "compute" and s["name"].startswith("experts")]
    before = [
        (e, w)
        for w in waits
        for e in experts
        if e["args"]["layer"] == w["args"]["layer"]
        and 0 <= w["ts"] - (e["ts"] + e["dur"]) < 500  # right before this wait began
    ]
    assert before, "no layer computed its hits before waiting for its misses"


async def test_u4_the_loop_is_never_blocked_for_long(model, facts):
    """Advisory on shared machines, so the bound is far above the documented few milliseconds."""
    lags: list[float] = []

    async def probe() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - start - 0.001)

    async with aprefetch.Runtime.open(model, **small(model)) as rt:
        await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=2)  # kernels are compiled
        async with asyncio.TaskGroup() as group:
            task = group.create_task(probe())
            await rt.generate(facts["prompts"]["p300"]["ids"], max_tokens=20, **GREEDY)
            task.cancel()
    assert np.median(lags) < 0.02
    assert max(lags) < 0.5


async def test_l0_off_means_no_guess(model, facts):
    async with aprefetch.Runtime.open(model, lookahead="off", **small(model)) as rt:
        await rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=10, **GREEDY)
        s = rt.stats()
    assert s.predicted == s.picked == 0


async def test_c9_a_new_run_begins_with_the_hot_list_of_an_earlier_one(model, facts, tmp_path):
    """Its first token misses less; a damaged list is passed over with a note."""
    path, ids = tmp_path / "hot.json", facts["prompts"]["p7"]["ids"]
    options = {"hot_list": str(path), "lookahead": "off", **small(model, 30)}
    misses = []
    for damage in (None, None, "not a list"):
        if damage is not None:
            path.write_text(damage)
        async with aprefetch.Runtime.open(model, **options) as rt:
            before = rt.stats()
            done = await rt.generate(ids, max_tokens=4, **GREEDY)
            misses.append(rt.stats().since(before).misses_device)
        assert done.token_ids == facts["greedy"]["p7"][:4]
        assert path.exists()
    assert misses[1] < min(misses[0], misses[2])


# -- damaged files ------------------------------------------------------------------------------


async def opens_or_fails_well(path: Path) -> str:
    """Open and run one token: our error or a result, within a time."""
    try:
        async with asyncio.timeout(60), aprefetch.Runtime.open(path, **small(path)) as rt:
            await rt.generate([1, 2, 3], max_tokens=1, temperature=0)
        return "ran"
    except AprefetchError as error:
        assert str(error)
        return type(error).__name__


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    from make_tiny_gguf import write_tiny_deepseek4

    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    write_tiny_deepseek4(
        path, n_layers=3, ratios=(0, 4, 128), n_experts=8, hidden=64, width=32, n_vocab=300,
        n_heads=2, head_dim=64, rope_dims=32, q_rank=32, out_groups=2, out_rank=32,
    )  # fmt: skip
    return path


async def test_truncated_files(tiny, tmp_path):
    data = tiny.read_bytes()
    assert await opens_or_fails_well(tiny) == "ran"
    rng, target = random.Random(11), tmp_path / "cut.gguf"
    for _ in range(200):
        target.write_bytes(data[: rng.randrange(len(data))])
        assert await opens_or_fails_well(target) != "ran"


async def test_flipped_header_bytes(tiny, tmp_path):
    data = tiny.read_bytes()
    header = min(t.offset for t in aprefetch.inspect(tiny).tensors)
    rng, target = random.Random(12), tmp_path / "flip.gguf"
    outcomes = set()
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        target.write_bytes(damaged)
        outcomes.add(await opens_or_fails_well(target))
    assert {"ran", "SourceError"} <= outcomes
