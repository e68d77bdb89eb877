"""States of sequences that ended, kept so that a longer prompt continues from them.

A state is good for exactly the tokens that made it, so it is found by exact prefix: of the kept
sequences that a prompt begins with, the longest. At least the last token of the prompt is always
left to be run, since it gives the first logits. Kept values live in host memory within a byte
budget, the least recently used leave first; what leaves goes to files, if there are any. Nothing
kept is ever written to: whoever continues gets copies.

One `PrefixCache` belongs to one open model, on the loop's thread; copies and files are worked on
elsewhere by whoever calls `copy`, `restore` and awaits the files.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from aprefetch.models.base import SequenceState
from aprefetch.models.kv_cache import StatePart

__all__ = ["KeptState", "PrefixCache", "StateStore"]

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]
Values = list[tuple[npt.NDArray[np.float32], int]]


class StateStore(Protocol):
    """Kept states in files (`storage.state_files.StateFiles`); all but `lengths` block."""

    def lengths(self) -> dict[bytes, int]:
        """Token counts by the keys of what is stored."""
        ...

    def read(self, key: bytes) -> tuple[Ids, Values] | None:
        """What was stored; None if it is gone or damaged."""
        ...

    def write(self, key: bytes, ids: Ids, values: Values) -> None:
        """Store, if it fits; never raises for the disk's faults."""
        ...


@dataclass(slots=True)
class KeptState:
    """A sequence's tokens and the values of its state, in host memory."""

    ids: Ids
    parts: list[StatePart]

    @property
    def n_tokens(self) -> int:
        """Tokens that need not be run again."""
        return len(self.ids)

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        return self.ids.nbytes + sum(4 * values.numel() for values, _ in self.parts)

    @classmethod
    def copy(cls, ids: Ids, state: SequenceState) -> KeptState:
        """A copy of `state` in host memory. Blocks; any thread, while no step uses the state."""
        assert state.n_tokens == len(ids)
        return cls(ids, [(v.to("cpu", copy=True), first) for v, first in state.dump()])

    def restore(self, state: SequenceState, device: torch.device) -> None:
        """Put a copy into a new state. Blocks; any thread.

        Raises:
            ValueError: it is of another model.
        """
        state.load([(v.to(device, copy=True), first) for v, first in self.parts], self.n_tokens)


class PrefixCache:
    """Finds and keeps states.

    Args:
        budget_bytes: most bytes in host memory.
        files: where states go that leave; None for nowhere.
        min_tokens: shorter sequences are not kept: running them costs less than a copy.
    """

    def __init__(
        self, budget_bytes: int, files: StateStore | None = None, *, min_tokens: int = 8
    ) -> None:
        self._budget_bytes = budget_bytes
        self._files = files
        self._min_tokens = min_tokens
        self._kept: OrderedDict[bytes, KeptState] = OrderedDict()  # least recently used first
        self._n_bytes = 0
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def n_bytes(self) -> int:
        """Bytes held in host memory."""
        return self._n_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def wants(self, n_tokens: int) -> bool:
        """Whether a sequence of so many tokens is worth keeping."""
        return n_tokens >= self._min_tokens

    def holds(self, ids: Ids) -> bool:
        """Whether just these tokens are in host memory."""
        return _key(ids) in self._kept

    async def find(self, prompt_ids: Sequence[int]) -> KeptState | None:
        """The longest kept beginning of a prompt that leaves a token to be run."""
        ids = np.asarray(prompt_ids, dtype=np.int64)
        for key, n_tokens in self._candidates(ids):
            kept = self._kept.get(key)
            if kept is None and self._files is not None:
                kept = await self._fetch(key)
            if kept is not None and np.array_equal(kept.ids, ids[:n_tokens]):
                if key in self._kept:
                    self._kept.move_to_end(key)
                return kept
        return None

    def _candidates(self, ids: Ids) -> list[tuple[bytes, int]]:
        """Keys of kept beginnings, the longest first."""
        lengths = {key: kept.n_tokens for key, kept in self._kept.items()}
        if self._files is not None:
            lengths |= self._files.lengths()
        digest, done, found = hashlib.blake2b(digest_size=16), 0, []
        for n_tokens in sorted({n for n in lengths.values() if n < len(ids)}):
            digest.update(ids[done:n_tokens].tobytes())
            done = n_tokens
            key = digest.copy().digest()
            if lengths.get(key) == n_tokens:
                found.append((key, n_tokens))
        return found[::-1]

    async def _fetch(self, key: bytes) -> KeptState | None:
        """From a file into host memory."""
        assert self._files is not None
        found = await asyncio.to_thread(self._files.read, key)
        if found is None:
            return None
        ids, values = found
        kept = KeptState(ids, [(torch.from_numpy(array), first) for array, first in values])
        if key not in self._kept:
            self._put(key, kept)
        return kept

    def keep(self, kept: KeptState) -> None:
        """Take over a copy; others may leave for it. One larger than the budget is let go."""
        key = _key(kept.ids)
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._put(key, kept)

    def _put(self, key: bytes, kept: KeptState) -> None:
        if kept.n_bytes > self._budget_bytes:
            return
        self._kept[key] = kept
        self._n_bytes += kept.n_bytes
        while self._n_bytes > self._budget_bytes:
            old_key, old = self._kept.popitem(last=False)
            self._n_bytes -= old.n_bytes
            if self._files is not None:
                task = asyncio.ensure_future(asyncio.to_thread(self._store, old_key, old))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    def _store(self, key: bytes, kept: KeptState) -> None:
        assert self._files is not None
        self._files.write(key, kept.ids, [(v.numpy(), first) for v, first in kept.parts])

    async def aclose(self) -> None:
        """Let everything go; with files, write what is not there yet."""
        kept, self._kept, self._n_bytes = self._kept, OrderedDict(), 0
        while self._leaving:
            await asyncio.wait(set(self._leaving))
        if self._files is not None and kept:

            def store_all() -> None:
                for key, state in kept.items():
                    self._store(key, state)

            await asyncio.to_thread(store_all)


def _key(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
