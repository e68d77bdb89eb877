"""Random sequences of everything, with the pipeline's invariants checked after each move."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from objects_on_disk import FileExperts
from pipeline_rig import SIZES, Rig, ScriptedReader, settle
from scripted_device import ScriptedDevice

from aprefetch.errors import DeviceError, ReadError
from aprefetch.pipeline.coordinator import Coordinator, Demand
from aprefetch.pipeline.slots import Lease, SlotState

LAYERS = st.sampled_from(sorted(SIZES))
EXPERTS = st.sets(st.integers(0, 7), min_size=1, max_size=8).map(sorted)


class PipelineMachine(RuleBasedStateMachine):
    """Demands, guesses, releases, closes, slow, failing and cancelled reads and copies, anyhow."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.demands: list[tuple[Demand, list[Lease], set[int]]] = []

    @initialize(
        vram=st.integers(0, 120_000),
        ram=st.one_of(st.none(), st.integers(0, 200_000)),
        policy=st.sampled_from(["lfu", "lru", "layered"]),
        ram_tier=st.sampled_from(["inclusive", "exclusive", "exclusive"]),
        share=st.sampled_from([0.0, 0.25, 0.5]),
    )
    def open(self, vram: int, ram: int | None, policy: str, ram_tier: str, share: float) -> None:
        experts = FileExperts(Path(self.folder.name) / "experts.bin", SIZES)
        least_vram, least_ram = Coordinator.minimum_budgets(experts)

        async def make() -> Rig:
            loop = asyncio.get_running_loop()
            return Rig(
                experts,
                vram=least_vram + vram,
                ram=0 if ram is None else least_ram + ram,
                reader=lambda base: ScriptedReader(base, loop),
                queue_depth=2,
                device=ScriptedDevice(),
                policy=policy,
                ram_tier=ram_tier,
                guess_share=share,
            )

        self.rig = self.runner.run(make())

    def turn(self, n: int = 1) -> None:
        async def spin() -> None:
            for _ in range(n):
                await asyncio.sleep(0)

        self.runner.run(spin())

    def run(self, fn):  # on the loop, as callers of the coordinator are
        async def call():
            return fn()

        return self.runner.run(call())

    @rule(layer=LAYERS, experts=EXPERTS)
    def demand(self, layer: int, experts: list[int]) -> None:
        if len(self.demands) < 4:
            demand = self.run(lambda: self.rig.coordinator.demand(layer, experts))
            self.demands.append((demand, [], set(experts)))

    @rule(which=st.integers(0, 3))
    def take(self, which: int) -> None:
        if which < len(self.demands):
            demand, held, left = self.demands[which]
            leases = self.run(demand.take)
            for lease in leases:
                left.remove(lease.key.expert)  # each comes once
            held += leases

    @rule(which=st.integers(0, 3), n=st.integers(1, 8))
    def release(self, which: int, n: int) -> None:
        if which < len(self.demands):
            demand, held, _ = self.demands[which]
            self.run(lambda: demand.release(held[:n]))
            del held[:n]

    @rule(which=st.integers(0, 3))
    def close(self, which: int) -> None:
        if which < len(self.demands):
            demand, held, _ = self.demands.pop(which)
            self.run(demand.close)
            assert not any(lease.is_live for lease in held)

    @rule(layer=LAYERS, experts=EXPERTS, exact=st.booleans())
    def guess(self, layer: int, experts: list[int], exact: bool) -> None:
        self.run(lambda: self.rig.coordinator.guess(layer, experts, exact=exact))

    @rule(layer=LAYERS)
    def end_layer(self, layer: int) -> None:
        self.run(lambda: self.rig.coordinator.end_layer(layer))

    @rule(holds=st.sets(st.integers(0, 7)), fails=st.sets(st.integers(0, 7)))
    def weather(self, holds: set[int], fails: set[int]) -> None:
        self.rig.reader.holds = lambda job: job.key.expert in holds
        self.rig.reader.fails = lambda job: job.key.expert in fails

    @rule(held=st.sets(st.booleans()), failing=st.sets(st.booleans()))
    def copies(self, held: set[bool], failing: set[bool]) -> None:
        self.rig.device.holds = lambda is_back: is_back in held
        self.rig.device.fails = lambda is_back: is_back in failing

    @rule()
    def let_go(self) -> None:
        self.run(self.rig.reader.let_go)

    @rule()
    def let_copies_go(self) -> None:
        self.run(self.rig.device.let_go)

    @rule(n=st.integers(1, 20))
    def time_passes(self, n: int) -> None:
        self.turn(n)

    @rule()
    def quiet(self) -> None:
        self.calm()
        self.runner.run(settle(self.rig))

    def calm(self) -> None:
        """From now on everything goes as it should."""
        reader, device = self.rig.reader, self.rig.device
        reader.holds = reader.fails = lambda job: False
        device.holds = device.fails = lambda is_back: False
        self.run(reader.let_go)
        self.run(device.let_go)

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.assert_sound(idle=False)
        for demand, held, left in self.demands:
            self.rig.check(held)  # a leased slot is never overwritten
            assert all(lease._slot.state is SlotState.LEASED for lease in held if lease.is_live)
            coming = {entry.key.expert for entry in (*demand.ready, *demand.missing)}
            assert left == coming | set(demand.failed)
            assert all(
                isinstance(error, ReadError | DeviceError) for error in demand.failed.values()
            )

    def finish(self) -> None:
        """Every open demand is served to its end once others don't hold what they have."""
        self.calm()

        async def serve() -> None:
            for demand, held, _ in self.demands:
                demand.release(held)
            async with asyncio.timeout(10):
                await asyncio.gather(*(self.rig.drain(demand) for demand, _, _ in self.demands))
            for demand, _, _ in self.demands:
                demand.close()
            self.rig.coordinator.drop_wishes()
            await settle(self.rig)

        self.runner.run(serve())
        self.rig.assert_sound()
        counters = self.rig.counters
        assert counters.guesses_issued == counters.guesses_useful + counters.guesses_wasted

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):
                try:
                    self.finish()
                finally:
                    self.runner.run(self.rig.aclose())
                assert self.rig.coordinator._n_moving == 0
        finally:
            self.runner.close()
            self.folder.cleanup()


TestPipelineMachine = PipelineMachine.TestCase
TestPipelineMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
