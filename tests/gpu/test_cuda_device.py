"""The CUDA device: pinned arena, copies, tickets, and slots under delayed kernels."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aprefetch.device.cuda import CudaDevice, CudaHostArena
from aprefetch.errors import OutOfDeviceMemoryError


@pytest.fixture
def device():
    made = CudaDevice(reserve_bytes=2**28)
    yield made
    made.close()


def upload(device, dst, src):
    arrived = asyncio.get_running_loop().create_future()
    device.copy_async([(dst, src)], arrived.set_result)
    return arrived


async def test_bytes_arrive_from_a_pinned_arena(device):
    arena = device.alloc_host(1 << 22)
    assert arena.is_pinned and device.n_pinned_bytes == 1 << 22
    assert arena.tensor.data_ptr() % 4096 == 0
    arena.tensor.random_(0, 256)
    slots = device.alloc_slots(1 << 22)
    assert await upload(device, slots, arena.tensor) is None
    assert torch.equal(slots.cpu(), arena.tensor)
    arena.close()
    arena.close()


async def test_copies_back_beside_copies_to_the_device(device):
    """Both ways at once, by tensor and by address, a hundred times."""
    n = 1 << 20
    arena, slots = device.alloc_host(4 * n), device.alloc_slots(4 * n)
    for turn in range(100):
        arena.tensor.random_(0, 256)
        want = arena.tensor.clone()
        assert await upload(device, slots[:n], arena.tensor[:n]) is None
        back = upload(device, arena.tensor[n : 2 * n], slots[:n])
        there = upload(device, slots[2 * n : 3 * n], arena.tensor[2 * n : 3 * n])
        assert await back is None and await there is None
        assert torch.equal(arena.tensor[n : 2 * n], want[:n])
        ticket = device.enqueue_copies_back(
            [(arena.tensor[3 * n :].data_ptr(), slots[2 * n :].data_ptr(), n)]
        )
        done = asyncio.Event()
        device.when_done(ticket, done.set)
        if turn % 2:
            device.expedite()
        await asyncio.wait_for(done.wait(), 10)
        assert torch.equal(arena.tensor[3 * n :], want[2 * n : 3 * n])


async def test_a_failing_pin_falls_back_and_leaves_no_error(device, monkeypatch):
    class Refuses:
        def cudaHostRegister(self, *_):
            return torch.cuda.cudart().cudaHostRegister(0, 0, 0xFFFF)

    real = torch.cuda.cudart
    monkeypatch.setattr(CudaHostArena, "_runtime", staticmethod(lambda: Refuses()))
    arena = device.alloc_host(1 << 20)
    assert not arena.is_pinned and device.n_pageable_bytes == 1 << 20
    torch.ones(1, device="cuda").item()  # an error left behind would come up here
    arena.tensor.random_(0, 256)
    slots = device.alloc_slots(1 << 20)
    assert await upload(device, slots, arena.tensor) is None
    assert torch.equal(slots.cpu(), arena.tensor)
    want = arena.tensor.clone()
    arena.tensor.zero_()
    assert await upload(device, arena.tensor, slots) is None  # and back
    assert torch.equal(arena.tensor, want)
    assert real is torch.cuda.cudart


async def test_more_slots_than_memory(device):
    with pytest.raises(OutOfDeviceMemoryError, match="lower vram_budget"):
        device.alloc_slots(1 << 50)


async def test_tickets_wait_for_delayed_kernels(device):
    """A slot is overwritten after its reader's ticket, however late the reader runs."""
    arena, slots = device.alloc_host(1 << 20), device.alloc_slots(1 << 20)
    for i in range(10):
        arena.tensor.fill_(i)
        assert await upload(device, slots, arena.tensor) is None
        torch.cuda._sleep(20_000_000)
        seen = slots.clone()  # reads late
        ticket = device.record()
        assert not ticket.done()
        await device.wait(ticket)
        assert ticket.done()
        arena.tensor.fill_(255)
        assert await upload(device, slots, arena.tensor) is None
        assert int(seen.min()) == int(seen.max()) == i


async def test_callbacks_come_on_the_loop_and_never_from_inside(device):
    import threading

    inside, threads = True, []
    done = asyncio.Event()

    def callback():
        threads.append(threading.get_ident())
        assert not inside
        done.set()

    torch.cuda._sleep(10_000_000)
    device.when_done(device.record(), callback)
    inside = False
    await asyncio.wait_for(done.wait(), 10)
    assert threads == [threading.get_ident()]
