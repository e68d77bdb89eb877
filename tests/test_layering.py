"""Imports point down the list of rooms in docs/architecture.md, and only down."""

from __future__ import annotations

import ast
from pathlib import Path

import aprefetch

ROOT = Path(aprefetch.__file__).parent
LEVELS = {
    "aprefetch.cli": 9,
    "aprefetch.server": 8,
    "aprefetch.runtime": 7,
    "aprefetch.report": 7,
    "aprefetch.plan": 7,
    "aprefetch.prompts": 7,
    "aprefetch.loading": 7,
    "aprefetch.doctor": 7,
    "aprefetch.inspection": 7,
    "aprefetch.engine": 6,
    "aprefetch.models": 5,
    "aprefetch.pipeline": 5,
    "aprefetch.device": 4,
    "aprefetch.kernels": 3,
    "aprefetch.storage": 3,
    "aprefetch.text": 3,
    "aprefetch.quant": 2,
    "aprefetch.stats": 1,
    "aprefetch.trace": 1,
    "aprefetch.routing_trace": 1,
    "aprefetch.trace_summary": 2,
    "aprefetch.config": 2,
    "aprefetch.sizes": 1,
    "aprefetch.types": 0,
    "aprefetch.errors": 0,
    "aprefetch.embedded": 0,
    "aprefetch._version": 0,
}
# Level 7 is one room in several files; on the other levels rooms do not import each other.
ONE_ROOM = {room for room, level in LEVELS.items() if level == 7}
DOOR = {"aprefetch", "aprefetch.__main__"}


def room_of(module: str) -> str | None:
    found = [room for room in LEVELS if module == room or module.startswith(room + ".")]
    return max(found, key=len) if found else None


def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            if node.module == "aprefetch" or room_of(node.module) is None:
                found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((node.module, node.lineno))
    return [(name, line) for name, line in found if name.split(".")[0] == "aprefetch"]


def modules() -> list[tuple[str, Path]]:
    out = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        out.append((".".join(parts).removesuffix(".__init__"), path))
    return out


def test_every_module_has_a_room() -> None:
    assert [m for m, _ in modules() if m not in DOOR and room_of(m) is None] == []


def test_imports_point_down() -> None:
    wrong = []
    for module, path in modules():
        if module in DOOR:
            continue
        room = room_of(module)
        assert room is not None
        for target, line in imports(path):
            other = room_of(target)
            if other == room or target == "aprefetch":
                continue
            if other is None:  # a public name, through the package's door
                down = LEVELS[room] > LEVELS["aprefetch.runtime"]
            else:
                down = LEVELS[other] < LEVELS[room]
            if not down and not {room, other} <= ONE_ROOM:
                wrong.append(f"{path}:{line}: {module} imports {target}")
    assert wrong == []


def test_models_know_nothing_of_files_slots_and_asyncio() -> None:
    for module, path in modules():
        if room_of(module) != "aprefetch.models":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"asyncio", "threading", "io", "os"}, f"{path}:{node.lineno}"
