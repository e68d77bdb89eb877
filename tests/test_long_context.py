"""33,000 tokens of context on the CPU: any chunks, the same bits, and memory that is bounded."""

from __future__ import annotations

import threading

import long_context
import numpy as np
import pytest

from aprefetch.engine.heap import resident_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return long_context.write_model(tmp_path_factory.mktemp("long") / "long.gguf")


class PeakResident:
    """The most memory that was resident inside of the `with`, above that before it."""

    def __enter__(self) -> PeakResident:
        self.before_bytes = self.most_bytes = resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most_bytes = max(self.most_bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth_bytes(self) -> int:
        return self.most_bytes - self.before_bytes


async def test_chunks_of_a_long_prompt_change_no_bit_and_memory_is_bounded(model) -> None:
    async with long_context.opened(model, "cpu", 512) as rt:
        await rt.generate(long_context.prompt()[:600], max_tokens=2)
        with PeakResident() as peak:
            whole = await long_context.answer(rt)
        # A quarter of what all tokens' scores over all rows would take.
        assert peak.growth_bytes < long_context.INDEX_SCORES_BYTES // 4
        long_context.check_states(rt, whole.states_bytes)
        logprobs, logits = await long_context.scored(rt, whole.token_ids)
    assert logits.argmax(axis=-1).tolist() == whole.token_ids
    assert np.allclose(logprobs[-len(whole.logprobs) :], whole.logprobs, atol=1e-5)
    assert whole.least_gap > 0.01  # so that other devices find the same tokens
    async with long_context.opened(model, "cpu", 1777) as rt:
        await long_context.alike(rt, whole, 1)
