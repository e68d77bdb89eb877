"""Building: once, in one pass, whatever happens in between."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pack_parts import (
    RAGGED,
    CountedFiles,
    all_bytes,
    built_cleanly,
    ending,
    file_digests,
    forked,
    kill_self,
    leftovers,
    write_model,
)

from aprefetch.errors import ConfigError, NoSpaceError, PackBuildError, PackError, SourceError
from aprefetch.storage import GgufExperts, open_source
from aprefetch.storage.pack import (
    PackFiles,
    PackProgress,
    build_pack,
    build_pack_async,
    copy_phase,
    crew,
    open_pack,
    verify_pack,
)
from aprefetch.storage.pack import build as pack_build
from aprefetch.storage.pack import copy as pack_copy


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("master") / "odd model.gguf", RAGGED)


@pytest.fixture
def model(master: Path, tmp_path: Path) -> Path:
    """A model of one's own."""
    folder = tmp_path / "model"
    folder.mkdir()
    return Path(shutil.copy(master, folder / master.name))


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many spans and syncs, even for little models."""
    monkeypatch.setattr(pack_copy, "SPAN_BYTES", 100_000)
    monkeypatch.setattr(copy_phase, "_SYNC_BYTES", 200_000)


@pytest.fixture(params=[1, 3], ids=["one part", "striped"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return [tmp_path / f"out {i}" for i in range(request.param)]


@pytest.fixture
def clean(model: Path, folders: list[Path], tmp_path: Path) -> list[str]:
    """Digests of an uninterrupted build."""
    return built_cleanly(model, [tmp_path / "clean" / f.name for f in folders])


def finished(folders: list[Path], paths: tuple[Path, ...], clean: list[str]) -> None:
    """The pack is the clean one, and nothing else is left."""
    assert file_digests(paths) == clean
    for folder in folders:
        assert leftovers(folder) == []


# -- one pass ---------------------------------------------------------------------------------


class Tallied(PackFiles):
    """Counts bytes."""

    def __init__(self) -> None:
        self.read = self.written = 0
        self.lock = threading.Lock()

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        n = super().preadv(fd, buffer, offset)
        with self.lock:
            self.read += n
        return n

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        n = super().pwrite(fd, data, offset)
        with self.lock:
            self.written += n
        return n


def test_each_byte_is_read_once_and_written_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()
    types = {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4"}
    model = write_model(tmp_path / "m.gguf", {0: (32, 1024, 512, types), 1: (32, 1024, 512, types)})
    files = Tallied()
    result = build_pack(model, [tmp_path / "out"], files=files)
    with open_source(model) as source:
        metadata = len(source._files[0].header.raw)
    assert files.read == result.bytes_read
    assert files.read <= 1.01 * result.payload_bytes + metadata
    assert files.written <= 1.01 * result.paths[0].stat().st_size


def test_second_time_it_is_reused(model: Path, folders: list[Path], clean: list[str]) -> None:
    first = build_pack(model, folders)
    assert first.state == "pack built"
    times = [p.stat().st_mtime_ns for p in first.paths]
    again = build_pack(model, folders)
    assert (again.state, again.bytes_read, again.bytes_written) == ("pack reused", 0, 0)
    assert [p.stat().st_mtime_ns for p in again.paths] == times
    finished(folders, again.paths, clean)


def test_shards_give_the_same_objects(small_shards: list[Path], tmp_path: Path) -> None:
    result = build_pack(small_shards[2], [tmp_path])
    assert result.paths[0].name.startswith("small-")
    assert "00003" not in result.paths[0].name
    with open_source(small_shards[0]) as source:
        direct = GgufExperts(source, range(3))
        assert all_bytes(open_pack(result.paths[0])) == all_bytes(direct)


def test_file_systems_without_direct_io(model: Path, folders: list[Path], clean: list[str]) -> None:
    class AtOpen(PackFiles):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O")
            return super().open(path, flags)

    result = build_pack(model, folders, files=AtOpen())
    finished(folders, result.paths, clean)

    class AtFirstUse(PackFiles):
        refused: set[int]

        def open(self, path: Path, flags: int) -> int:
            fd = super().open(path, flags & ~os.O_DIRECT)
            if flags & os.O_DIRECT:
                self.refused.add(fd)
            else:
                self.refused.discard(fd)
            return fd

        def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
            if fd in self.refused:
                raise OSError(errno.EINVAL, "no direct I/O")
            return super().preadv(fd, buffer, offset)

        def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
            if fd in self.refused:
                raise OSError(errno.EINVAL, "no direct I/O")
            return super().pwrite(fd, data, offset)

    files = AtFirstUse()
    files.refused = set()
    result = build_pack(model, folders, files=files, rebuild=True)
    finished(folders, result.paths, clean)


def test_short_reads_and_writes_are_continued(
    model: Path, folders: list[Path], clean: list[str]
) -> None:
    class Short(PackFiles):
        def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
            return super().preadv(fd, buffer[: max(4096, len(buffer) // 2 // 4096 * 4096)], offset)

        def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
            return super().pwrite(fd, data[: max(4096, len(data) // 2 // 4096 * 4096)], offset)

    result = build_pack(model, folders, files=Short())
    finished(folders, result.paths, clean)


# -- order, kills -----------------------------------------------------------------------------


def test_commit_order(model: Path, tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    class Recording(PackFiles):
        def open(self, path: Path, flags: int) -> int:
            fd = super().open(path, flags)
            names[fd] = path.name.rsplit(".", 1)[-1]
            return fd

        def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
            what = "header" if names[fd] == "partial" and offset == 0 else names[fd]
            log.append(("write", what))
            return super().pwrite(fd, data, offset)

        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            log.append(("sync", names[fd]))

        def replace(self, old: Path, new: Path) -> None:
            assert old.name == new.name + ".partial"
            super().replace(old, new)
            log.append(("rename", new.name[-19:]))

        def sync_folder(self, folder: Path) -> None:
            super().sync_folder(folder)
            log.append(("sync folder", folder.name))

        def unlink(self, path: Path) -> None:
            super().unlink(path)
            log.append(("unlink", path.suffix[1:]))

    build_pack(model, [tmp_path / "a", tmp_path / "b"], files=Recording())
    last_data = max(i for i, entry in enumerate(log) if entry == ("write", "partial"))
    assert log[last_data + 1 :][-13:] == [
        ("sync", "partial"), ("sync", "partial"), ("write", "journal"), ("sync", "journal"),
        ("write", "header"), ("sync", "partial"), ("write", "header"), ("sync", "partial"),
        ("rename", "00002-of-00002.gguf"), ("sync folder", "a"), ("sync folder", "b"),
        ("rename", "00001-of-00002.gguf"), ("sync folder", "a"), ("sync folder", "b"),
        ("unlink", "journal"), ("sync folder", "a"),
    ][-13:]  # fmt: skip
    # A record enters the journal only after all data that it speaks of was synced.
    for i, entry in enumerate(log):
        if entry == ("write", "journal") and i > 0 and ("write", "partial") in log[:i]:
            assert log[i - 2 : i] == [("sync", "partial")] * 2 or log[i - 1] == ("sync", "partial")


def count_calls(model: Path, folders: list[Path]) -> list[str]:
    names: list[str] = []
    build_pack(model, folders, files=CountedFiles(lambda n, name: names.append(name)), n_workers=1)
    return names


def killed_at(model: Path, folders: list[Path], at: int) -> bool:
    """A build that kills itself at one of the calls that change the disk; was it killed?"""

    def strike(n: int, name: str) -> None:
        if n == at:
            kill_self()

    pid = forked(lambda: build_pack(model, folders, files=CountedFiles(strike), n_workers=1))
    code = ending(pid)
    assert code in (-signal.SIGKILL, 0)
    return code != 0


def test_killed_at_every_commit_point_and_25_other_calls(
    model: Path, folders: list[Path], clean: list[str], tmp_path: Path
) -> None:
    names = count_calls(model, [tmp_path / "count" / f.name for f in folders])
    sizes = {p.stat().st_size for p in (tmp_path / "clean").rglob("*.gguf")}
    last_data = max(i for i, name in enumerate(names) if name == "pwrite") - 4 * len(folders)
    points = set(range(last_data, len(names)))
    if len(folders) == 1:
        points |= set(range(6)) | set(random.Random(5).sample(range(6, last_data), 25))
    states, n_killed = set(), 0
    for at in sorted(points):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        n_killed += killed_at(model, folders, at)
        for folder in folders:  # a name without the suffix is a complete file
            assert {p.stat().st_size for p in folder.glob("*.gguf")} <= sizes
        result = build_pack(model, folders)
        states.add(result.state)
        finished(folders, result.paths, clean)
    assert n_killed > 0.9 * len(points)
    assert states >= {"pack resumed", "pack reused"}


def test_killed_again_and_again(model: Path, folders: list[Path], clean: list[str]) -> None:
    """Each build gets a little further than the one before."""

    class Slow(PackFiles):
        def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
            time.sleep(0.004)
            return super().pwrite(fd, data, offset)

    rng = random.Random(9)
    n_killed = 0
    for _ in range(25):
        pid = forked(lambda: build_pack(model, folders, files=Slow(), n_workers=2))
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGKILL)
        n_killed += ending(pid) == -signal.SIGKILL
    assert n_killed >= 1
    result = build_pack(model, folders)
    finished(folders, result.paths, clean)


def killed_midway(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that dies when the journal tells of about half of the objects."""
    monkeypatch.setattr(crew, "_TICK_S", 0.001)
    n_syncs = 0

    def strike(n: int, name: str) -> None:
        nonlocal n_syncs
        n_syncs += name == "fdatasync"
        time.sleep(0.01 if name == "pwrite" else 0)
        if n_syncs == 9:  # begun and ended: the journal's head, then data and records
            kill_self()

    pid = forked(lambda: build_pack(model, [out], files=CountedFiles(strike), n_workers=1))
    assert ending(pid) == -signal.SIGKILL


def test_a_resumed_build_copies_only_what_is_missing(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"
    killed_midway(model, out, monkeypatch)
    progress: list[PackProgress] = []
    result = build_pack(model, [out], progress=progress.append)
    assert result.state == "pack resumed"
    assert 0 < result.bytes_read < 0.95 * result.payload_bytes
    copied = [p for p in progress if p.phase == "copy"]
    assert copied[-1].bytes_before > 0
    assert copied[-1].bytes_done == copied[-1].total_bytes == result.payload_bytes
    finished([out], result.paths, built_cleanly(model, [tmp_path / "clean"]))


def test_torn_and_foreign_journals(model: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    clean = built_cleanly(model, [tmp_path / "clean"])
    for damage in (
        lambda raw: raw[:-7],
        lambda raw: raw[:-30] + bytes([raw[-30] ^ 1]) + raw[-29:],
        lambda raw: raw + b"\1" * 24,
        lambda raw: raw[:50],
        lambda raw: b"",
        lambda raw: raw.replace(b'"builder": 1', b'"builder": 0'),
    ):
        shutil.rmtree(out, ignore_errors=True)
        killed_midway(model, out, monkeypatch)
        journal = next(out.glob("*.journal"))
        journal.write_bytes(damage(journal.read_bytes()))
        result = build_pack(model, [out])
        finished([out], result.paths, clean)


def test_the_source_changes_between_kill_and_restart(
    model: Path, folders: list[Path], tmp_path: Path
) -> None:
    names = count_calls(model, [tmp_path / "count" / f.name for f in folders])
    killed_at(model, folders, len(names) * 2 // 3)
    raw = bytearray(model.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 5000] = b"x" * 5000
    model.write_bytes(raw)
    clean = built_cleanly(model, [tmp_path / "clean" / f.name for f in folders])
    result = build_pack(model, folders)
    assert result.state == "pack built"
    finished(folders, result.paths, clean)
    with open_source(model) as source:
        assert all_bytes(open_pack(result.paths[0], folders=folders)) == all_bytes(
            GgufExperts(source, range(6))
        )


def test_the_source_changes_during_the_build(model: Path, tmp_path: Path) -> None:
    class Meddling(PackFiles):
        n = 0

        def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
            Meddling.n += 1
            if Meddling.n == 4:
                with model.open("rb+") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"!")
            return super().pwrite(fd, data, offset)

    with pytest.raises(SourceError, match="changed while in use"):
        build_pack(model, [tmp_path / "out"], files=Meddling())
    result = build_pack(model, [tmp_path / "out"])
    finished([tmp_path / "out"], result.paths, built_cleanly(model, [tmp_path / "clean"]))


# -- space ------------------------------------------------------------------------------------


class FullAt(PackFiles):
    """A file system with room for so many bytes of payload."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.lock = threading.Lock()

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        with self.lock:
            if len(data) > self.room:
                raise OSError(errno.ENOSPC, "no space")
            self.room -= len(data)
        return super().pwrite(fd, data, offset)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 0.999])
def test_a_full_disk_leaves_something_to_resume(
    model: Path, folders: list[Path], clean: list[str], share: float
) -> None:
    total = 745_000
    with pytest.raises(NoSpaceError, match="goes on where it stopped") as caught:
        build_pack(model, folders, files=FullAt(int(share * total)))
    assert caught.value.resumable
    result = build_pack(model, folders)
    finished(folders, result.paths, clean)


def test_free_space_is_checked_first(model: Path, folders: list[Path]) -> None:
    class Small(PackFiles):
        def free_bytes(self, folder: Path) -> int:
            return 100_000

    with pytest.raises(NoSpaceError, match=r"are missing; make room, or choose another") as caught:
        build_pack(model, folders, files=Small())
    assert caught.value.available == 100_000
    assert caught.value.needed > 745_000
    assert [p.name for f in folders for p in f.iterdir()] == []


def test_failing_drives(model: Path, tmp_path: Path) -> None:
    class Failing(PackFiles):
        def fdatasync(self, fd: int) -> None:
            raise OSError(errno.EIO, "I/O error")

    with pytest.raises(PackBuildError, match="check the drive"):
        build_pack(model, [tmp_path / "out"], files=Failing())
    finished(
        [tmp_path / "out"],
        build_pack(model, [tmp_path / "out"]).paths,
        built_cleanly(model, [tmp_path / "clean"]),
    )


def test_wrong_folders_and_options(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackBuildError, match="choose other folders"):
        build_pack(model, [tmp_path / "file"])
    for alignment in (512, 5000, 1 << 21):
        with pytest.raises(ConfigError, match="power of two"):
            build_pack(model, [tmp_path], alignment=alignment)
    with pytest.raises(PackBuildError, match="no routed experts") as caught:
        build_pack(model, [tmp_path], layers=[0])
    assert not caught.value.resumable


# -- several at once --------------------------------------------------------------------------


class Slowly(PackFiles):
    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        time.sleep(0.006)
        return super().pwrite(fd, data, offset)


def test_two_processes_build_once(
    model: Path, folders: list[Path], clean: list[str], tmp_path: Path
) -> None:
    def build(number: int) -> Callable[[], None]:
        def work() -> None:
            result = build_pack(model, folders, files=Slowly())
            assert verify_pack(open_pack(result.paths[0], folders=folders)).corrupt == ()
            (tmp_path / f"state {number}").write_text(result.state)

        return work

    pids = [forked(build(i)) for i in range(3)]
    assert [ending(pid) for pid in pids] == [0, 0, 0]
    states = sorted((tmp_path / f"state {i}").read_text() for i in range(3))
    assert states == ["pack built", "pack reused", "pack reused"]
    finished(folders, build_pack(model, folders).paths, clean)


def test_the_second_takes_over_when_the_first_dies(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def slow() -> None:
        build_pack(model, [out], files=Slowly(), n_workers=1)

    first = forked(slow)
    while not list(out.glob("*.journal") if out.exists() else ()):
        time.sleep(0.002)
    second = forked(slow)
    os.kill(first, signal.SIGKILL)
    assert ending(second) == 0
    ending(first)
    finished([out], build_pack(model, [out]).paths, built_cleanly(model, [tmp_path / "clean"]))


# -- asyncio ----------------------------------------------------------------------------------


async def test_progress_and_cancel_from_asyncio(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(crew, "_TICK_S", 0.001)
    monkeypatch.setattr(crew, "_REPORT_NS", 0)
    out = tmp_path / "out"
    events: list[PackProgress] = []
    started = asyncio.Event()
    thread = threading.get_ident()

    def note(event: PackProgress) -> None:
        assert threading.get_ident() == thread
        events.append(event)
        if event.phase == "copy" and event.bytes_done:
            started.set()

    n_descriptors = len(os.listdir("/proc/self/fd"))
    task = asyncio.create_task(
        build_pack_async(model, [out], progress=note, files=Slowly(), n_workers=1)
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(os.listdir("/proc/self/fd")) == n_descriptors
    assert leftovers(out) != []
    result = await build_pack_async(model, [out], progress=note)
    assert result.state == "pack resumed"
    await asyncio.sleep(0)
    assert {e.phase for e in events} >= {"copy", "commit"}
    assert all(0 <= e.bytes_done <= e.total_bytes for e in events)
    assert events[-1].bytes_done == events[-1].total_bytes
    finished([out], result.paths, built_cleanly(model, [tmp_path / "clean"]))


async def test_cancel_while_waiting_for_another_build(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    waiting = asyncio.Event()

    def note(event: PackProgress) -> None:
        if event.phase == "wait":
            waiting.set()

    with held_lock(model, out):
        task = asyncio.create_task(build_pack_async(model, [out], progress=note))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await build_pack_async(model, [out])).state == "pack built"


def held_lock(model: Path, out: Path):  # type: ignore[no-untyped-def]
    from aprefetch.storage.pack.identity import pack_names
    from aprefetch.storage.pack.lock import pack_lock

    out.mkdir()
    with open_source(model) as source:
        name = pack_names(source, source.identity(), 1)[0]
    return pack_lock(out / f"{name}.lock", lambda: None)


def test_a_set_flag_cancels_the_blocking_call(model: Path, tmp_path: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(PackBuildError, match="cancelled") as caught:
        build_pack(model, [tmp_path], cancel=cancel)
    assert caught.value.resumable


# -- what must not be lost --------------------------------------------------------------------


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, int], None]]:
    """Makes opening a path fail with an errno (root may open anything)."""
    real = os.open
    broken: dict[str, int] = {}

    def opening(path, flags, *args, **keywords):  # type: ignore[no-untyped-def]
        if str(path) in broken:
            raise OSError(broken[str(path)], os.strerror(broken[str(path)]))
        return real(path, flags, *args, **keywords)

    monkeypatch.setattr(os, "open", opening)
    yield lambda path, code: broken.__setitem__(str(path), code)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_errors_never_cost_a_good_pack(
    model: Path, folders: list[Path], clean: list[str], unreadable, code: int, monkeypatch
) -> None:
    paths = build_pack(model, folders).paths
    unreadable(paths[-1], code)
    with pytest.raises(PackError, match="left as it is"):
        build_pack(model, folders)
    monkeypatch.undo()
    finished(folders, paths, clean)


def test_a_missing_part_is_told_and_the_others_stay(model: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    paths = build_pack(model, folders).paths
    kept = file_digests(paths)
    away = tmp_path / "away.bin"
    paths[1].rename(away)
    for entry in (paths[0], paths[2]):
        with pytest.raises(PackError, match="1 of 3 parts of the pack are missing.*00002-of-00003"):
            open_pack(entry)
    with pytest.raises(PackError, match="missing"):
        build_pack(model, folders)
    away.rename(paths[1])
    assert file_digests(paths) == kept
    assert build_pack(model, folders).state == "pack reused"


def test_a_foreign_file_under_the_name_stays(model: Path, tmp_path: Path) -> None:
    path = build_pack(model, [tmp_path]).paths[0]
    path.write_text("something else")
    with pytest.raises(PackError, match="--rebuild"):
        build_pack(model, [tmp_path])
    assert path.read_text() == "something else"
    result = build_pack(model, [tmp_path], rebuild=True)
    assert file_digests(result.paths) == built_cleanly(model, [tmp_path / "clean"])


def test_rebuild_keeps_the_old_pack_until_the_new_one_is_whole(model: Path, tmp_path: Path) -> None:
    path = build_pack(model, [tmp_path]).paths[0]
    clean = file_digests([path])
    with pytest.raises(NoSpaceError):
        build_pack(model, [tmp_path], rebuild=True, files=FullAt(500_000))
    assert file_digests([path]) == clean
    result = build_pack(model, [tmp_path], rebuild=True)
    assert result.state == "pack resumed"
    finished([tmp_path], result.paths, clean)


def test_parts_of_different_builds_are_refused(model: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    old = build_pack(model, folders).paths
    kept = [p.read_bytes() for p in old]
    # The same fingerprint, other bytes: what a build from an older version would be.
    with open_source(model) as source:
        info = source.tensors["blk.1.ffn_up_exps.weight"]
    raw = bytearray(model.read_bytes())
    raw[info.offset + 100_003] ^= 1
    model.write_bytes(raw)
    result = build_pack(model, folders)
    if result.paths == old:
        assert result.state == "pack built"
        old[1].write_bytes(kept[1])
        with pytest.raises(PackError, match="different builds"):
            open_pack(old[0])


def test_progress_tells_rates() -> None:
    event = PackProgress(
        phase="copy", bytes_done=300, total_bytes=900, bytes_before=100, elapsed_s=2
    )
    assert event.bytes_per_s == 100
    assert event.left_s == 6
    assert PackProgress(phase="copy", bytes_done=0, total_bytes=9).left_s is None


def test_default_layers_leave_next_token_blocks_out(small_model: Path) -> None:
    with open_source(small_model) as source:
        assert list(pack_build.default_layers(source)) == [0, 1, 2]
