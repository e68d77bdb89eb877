"""A small pipeline over a real file, and checks on what it delivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from objects_on_disk import FileExperts

from aprefetch.device.cpu import CpuDevice
from aprefetch.errors import ReadError
from aprefetch.pipeline.coordinator import Coordinator, Demand
from aprefetch.pipeline.objects import Stage
from aprefetch.pipeline.reader import ReadCancelled, make_reader
from aprefetch.pipeline.slots import Lease, SlotState
from aprefetch.stats import Counters

SIZES = {1: (3000, 3000, 2100), 2: (3000, 3000, 2100), 4: (9000, 9000, 6500)}
BIG = 1 << 30


class Rig:
    """A coordinator with its reader and device. Budgets default to the minimum."""

    def __init__(
        self,
        experts: FileExperts,
        *,
        vram: int | None = None,
        ram: int | None = None,
        reader: Any = None,
        files: Any = None,
        queue_depth: int = 4,
        device: CpuDevice | None = None,
        **options: Any,
    ) -> None:
        least_vram, least_ram = Coordinator.minimum_budgets(experts)
        self.experts = experts
        self.counters = Counters()
        self.device = device or CpuDevice()
        self.reader: Any = make_reader(
            experts.paths, counters=self.counters, queue_depth=queue_depth, files=files
        )
        if reader is not None:
            self.reader = reader(self.reader)
        self.vram = least_vram if vram is None else vram
        self.ram = least_ram if ram is None else ram
        self.coordinator = Coordinator(
            experts,
            self.device,
            self.reader,
            vram_budget=self.vram,
            ram_budget=self.ram,
            counters=self.counters,
            **options,
        )

    async def aclose(self) -> None:
        await self.coordinator.aclose()
        await self.reader.aclose()
        self.device.close()

    def check(self, leases: Iterable[Lease]) -> None:
        """The bytes in each slot are the source's bytes."""
        arena = self.coordinator.arena.numpy()
        for lease in leases:
            for offset, want in self.experts.expected(lease.key):
                at = lease.offset + offset
                assert np.array_equal(arena[at : at + len(want)], want), lease.key

    async def drain(self, demand: Demand) -> list[int]:
        """Take, check and release all of a demand, in waves; the experts in order of arrival."""
        got = []
        while leases := demand.take() or await demand.wait():
            self.check(leases)
            got += [lease.key.expert for lease in leases]
            demand.release(leases)
        return got

    async def use(self, layer: int, experts: Iterable[int]) -> list[int]:
        """One whole demand."""
        with self.coordinator.demand(layer, sorted(set(experts))) as demand:
            return await self.drain(demand)

    def assert_sound(self, *, idle: bool = True) -> None:
        """Invariants that hold at any time, and those of a pipeline at rest."""
        c, n = self.coordinator._tiers, self.counters
        for pools, ledger in ((c.landing_pools, c.ram), (c.device_pools, c.vram)):
            in_use = 0
            for pool in pools:
                free = set(map(id, pool.free))
                assert len(free) == len(pool.free)
                unavailable = demoting = 0
                for slot in pool.slots:
                    is_free = slot.state is SlotState.FREE
                    assert is_free == (id(slot) in free) == (slot.entry is None)
                    if is_free:
                        continue
                    in_use += slot.n_bytes
                    entry = slot.entry
                    assert entry is not None
                    assert slot is (entry.landing if pools is c.landing_pools else entry.device)
                    admitted = entry.item in pool.policy._admitted  # type: ignore[attr-defined]
                    ahead = entry in pool.guesses or entry in pool.exact
                    is_copy = entry in pool.duplicates
                    assert not (is_copy and (admitted or entry.device is None))
                    unavailable += not (admitted or is_copy) and (not ahead or entry.stage != 0)
                    assert not (admitted and slot.pins)
                    in_use_early = slot.copy is not None and slot.state is SlotState.UPLOADING
                    assert in_use_early or (slot.state is SlotState.LEASED) == (slot.pins > 0)
                    if idle:
                        assert slot.state is SlotState.RESIDENT or ahead
                    demoting += slot.state is SlotState.DEMOTING
                    assert (slot.state is SlotState.DEMOTING) == (entry.stage == Stage.DEMOTING)
                assert unavailable == pool.n_unavailable
                assert demoting == pool.n_demoting or pools is c.landing_pools
                if idle:
                    assert pool.n_unavailable == 0 and not pool.open
                    assert pool.wanted.head() is None
            assert in_use == ledger.used_bytes <= ledger.peak_bytes <= ledger.limit_bytes
        assert n.hits_ram + n.misses_ram == n.misses_device
        assert n.duplicate_reads == 0
        waiting = sum(e.wish == 1 for lane in c.lanes.values() for e in lane.wishes)
        assert n.guesses_issued == n.guesses_useful + n.guesses_wasted + waiting


class ScriptedReader:
    """A reader that holds reads back, or fails them, as told; everything else is the real one's.

    It stands between coordinator and reader, so a held read is like one in a slow drive's queue:
    it can be promoted and cancelled.
    """

    def __init__(self, base: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.base = base
        self.loop = loop
        self.held: dict[Any, Any] = {}  # key -> job
        self.holds: Callable[[Any], bool] = lambda job: False
        self.fails: Callable[[Any], bool] = lambda job: False
        self.log: list[tuple[str, Any, int]] = []  # (what, key, priority)

    def submit(self, job: Any) -> None:
        self.log.append(("submit", job.key, job.priority))
        if self.holds(job):
            self.held[job.key] = job
        else:
            self._pass_on(job)

    def _pass_on(self, job: Any) -> None:
        if self.fails(job):
            read = job.reads[0]
            error = ReadError(
                "input/output error", path="x", offset=read.offset, length=read.length, key=job.key
            )
            self.loop.call_soon(job.done, job, error)
        else:
            self.base.submit(job)

    def let_go(self, key: Any = None) -> None:
        """Go on with one held read, or with all, the last first."""
        for name in [key] if key is not None else list(self.held)[::-1]:
            self._pass_on(self.held.pop(name))

    def promote(self, job: Any, priority: Any) -> None:
        self.log.append(("promote", job.key, priority))
        if job.key in self.held:
            job.priority = min(job.priority, priority)
        else:
            self.base.promote(job, priority)

    def cancel(self, job: Any) -> None:
        self.log.append(("cancel", job.key, job.priority))
        if self.held.get(job.key) is job:
            del self.held[job.key]
            self.loop.call_soon(job.done, job, ReadCancelled("cancelled"))
        else:
            self.base.cancel(job)

    async def aclose(self) -> None:
        self.let_go()
        await self.base.aclose()


async def settle(rig: Rig) -> None:
    """Until nothing moves."""
    async with asyncio.timeout(10):
        while rig.coordinator._n_moving:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
