"""33,000 tokens of context on a GPU: the CPU's tokens, the same bits in any chunks, memory bounded.

What the device may hold for such a request is computed from the model: the caches of the sequence
(stores double, and the old one is there while the new one is filled), those of the decoder (for
65,536 positions), rotary tables, and a slack of 64 MiB for the activations of one chunk. The scores
of all tokens over all compressed rows alone would be 1.09 GB.
"""

from __future__ import annotations

import asyncio
import gc

import long_context
import numpy as np
import pytest
import torch

CHUNK = 512
SLACK_BYTES = 64 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return long_context.write_model(tmp_path_factory.mktemp("long") / "long.gguf")


@pytest.fixture(scope="module")
def whole(model):
    """The answer with everything as usual."""

    async def run():
        async with long_context.opened(model, "cuda", CHUNK) as rt:
            return await long_context.answer(rt)

    return asyncio.run(run())


def held_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def stays_bytes(info) -> int:
    """What the first long request leaves for later ones: rotary tables, the decoder's caches."""
    rope = 2 * 2 * long_context.CONTEXT * long_context.ROPE_DIMS // 2 * 4
    return rope + info.state_bytes_per_token * long_context.CONTEXT + info.state_bytes_fixed


async def test_device_memory_is_bounded_by_the_caches_and_given_back(model) -> None:
    before_opening = held_bytes()
    async with long_context.opened(model, "cuda", CHUNK) as rt:
        info = rt.model_info
        await rt.generate(long_context.prompt()[:600], max_tokens=4, ignore_eos=True)
        before = held_bytes()
        torch.cuda.reset_peak_memory_stats()
        got = await long_context.answer(rt)
        peak = torch.cuda.max_memory_allocated() - before
        after = held_bytes() - before
        long_context.check_states(rt, got.states_bytes)
        stays = stays_bytes(info)
        caches = info.state_bytes_fixed + 3 * info.state_bytes_per_token * long_context.CONTEXT
        numbers = f"peak {peak}, after {after}, caches {caches}, stays {stays}"
        assert peak <= caches + 2 * stays + SLACK_BYTES, numbers
        assert peak < long_context.INDEX_SCORES_BYTES // 4, numbers
        assert after <= stays + (4 << 20), numbers
        # The second time there is nothing more to keep.
        torch.cuda.reset_peak_memory_stats()
        await long_context.alike(rt, got, 1)
        again = held_bytes() - before
        assert again <= after + (1 << 20), f"{numbers}, after another {again}"
        # What stayed from the first time was not there when that began.
        assert torch.cuda.max_memory_allocated() - before <= peak + after + (4 << 20)
        del rt
    closed = held_bytes() - before_opening
    assert closed <= 8 << 20, f"{closed} bytes are held after closing"


async def test_chunks_and_company_change_no_bit(model, whole) -> None:
    for chunk in (300, 2048):
        async with long_context.opened(model, "cuda", chunk) as rt:
            await long_context.alike(rt, whole, 1)
    async with long_context.opened(model, "cuda", CHUNK) as rt:
        await long_context.alike(rt, whole, 2)


async def test_every_position_is_as_on_the_cpu(model, whole) -> None:
    async with long_context.opened(model, "cuda", 1024) as rt:
        ours, our_logits = await long_context.scored(rt, whole.token_ids)
    async with long_context.opened(model, "cpu", 512, kernels="reference") as rt:
        theirs, their_logits = await long_context.scored(rt, whole.token_ids)
    assert our_logits.argmax(axis=-1).tolist() == whole.token_ids  # decoded from graphs
    assert their_logits.argmax(axis=-1).tolist() == whole.token_ids
    off = np.abs(ours - theirs)  # where a choice is nearly a tie, devices may differ
    assert (off <= 1e-3).mean() >= 0.99 and np.median(off) <= 1e-4
    assert np.allclose(ours[-len(whole.logprobs) :], whole.logprobs, atol=1e-5)
