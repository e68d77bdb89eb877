"""The CPU device: memory, copies, the compute thread."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from aprefetch.device.cpu import CpuDevice
from aprefetch.errors import DeviceError, OutOfDeviceMemoryError, RuntimeClosedError


@pytest.fixture
def device():
    made = CpuDevice()
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("aprefetch-co")]


@pytest.mark.parametrize("alignment", [512, 4096, 65536])
@pytest.mark.parametrize("n_bytes", [1, 4096, 100_001])
def test_r8_host_memory_is_aligned_and_seen_both_ways(device, n_bytes, alignment):
    arena = device.alloc_host(n_bytes, alignment)
    assert arena.tensor.data_ptr() % alignment == 0
    assert arena.tensor.numel() == len(arena.view) == arena.n_bytes == n_bytes
    arena.view[0] = 7
    assert arena.tensor[0] == 7
    kept = arena.tensor
    arena.close()
    arena.close()
    kept.fill_(3)  # memory lives as long as somebody sees it
    with pytest.raises(RuntimeClosedError):
        _ = arena.tensor


def test_memory_that_is_not_to_be_had(device):
    with pytest.raises(DeviceError, match="ram_budget"):
        device.alloc_host(1 << 62)
    with pytest.raises(OutOfDeviceMemoryError, match="vram_budget"):
        device.alloc_slots(1 << 62)
    total, free = device.memory_info()
    assert 0 < free <= total


@pytest.mark.parametrize("n_bytes", [1000, 1 << 20])
async def test_copies_report_later_on_the_loop_thread(device, n_bytes):
    src = torch.arange(n_bytes, dtype=torch.int64).to(torch.uint8)
    done = asyncio.get_running_loop().create_future()
    seen = []
    dst = [torch.zeros(n_bytes, dtype=torch.uint8) for _ in range(3)]

    def finished(error):
        seen.append((error, threading.current_thread()))
        if len(seen) == 3:
            done.set_result(None)

    for target in dst:
        device.copy_async([(target[: n_bytes // 2], src[: n_bytes // 2])], finished)
    assert seen == []
    await done
    assert seen == [(None, threading.main_thread())] * 3
    for target in dst:
        assert torch.equal(target[: n_bytes // 2], src[: n_bytes // 2])
        assert not target[n_bytes // 2 :].any()


@pytest.mark.parametrize("n_bytes", [1000, 1 << 20])
async def test_a_copy_that_fails_reports_its_error(device, n_bytes):
    done = asyncio.get_running_loop().create_future()
    short = torch.zeros(n_bytes - 1, dtype=torch.uint8)
    device.copy_async([(torch.zeros(n_bytes, dtype=torch.uint8), short)], done.set_result)
    assert isinstance(await done, ValueError)


async def test_compute_runs_on_one_thread_and_its_errors_come_back(device):
    names = [await device.run(lambda: threading.current_thread().name) for _ in range(3)]
    assert len(set(names)) == 1 and names[0].startswith("aprefetch-compute")
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 // 0)
    assert device.inline(1000) and not device.inline(1 << 40)


async def test_f3_cancelling_waits_for_compute_that_cannot_be_stopped(device):
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work():
        started.set()
        go.wait(10)
        ended.set()
        raise RuntimeError("nobody hears this, and nobody is warned of it")

    task = asyncio.ensure_future(device.run(work))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_tickets_are_done_at_once(device):
    ticket = device.record()
    assert ticket.done()
    await device.wait(ticket)
    done = asyncio.get_running_loop().create_future()
    device.when_done(ticket, lambda: done.set_result(None))
    assert not done.done()
    await done


async def test_a_closed_device_takes_no_work():
    device = CpuDevice()
    await device.run(lambda: None)
    device.close()
    device.close()
    with pytest.raises(RuntimeClosedError):
        await device.run(lambda: None)
    with pytest.raises(RuntimeClosedError):
        device.copy_async([], lambda error: None)


async def test_slots_start_at_multiples_of_256(device):
    slots = device.alloc_slots(10_000)
    assert slots.data_ptr() % 256 == 0 and slots.dtype == torch.uint8
    assert np.count_nonzero(slots.numpy()) == 0
