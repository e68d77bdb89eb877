"""The cases for compute-sanitizer: every type in every role, slots that end with their memory."""

from __future__ import annotations

import numpy as np
import sanitize_kernels as tool

from aprefetch.types import ROLES


def test_every_type_takes_every_role_and_every_role_is_last() -> None:
    cases = list(tool.cases(tool.TYPES))
    for i in range(len(ROLES)):
        assert {case.types[i] for case in cases} == set(tool.TYPES)
    assert {case.last for case in cases} == {0, 1, 2}
    assert any(case.hidden % 256 for case in cases)


def test_the_last_role_ends_with_the_arena() -> None:
    for case in (tool.Case(("Q8_0", "BF16", "MXFP4"), 96, 32, last) for last in range(3)):
        arena, offsets, layout = tool.fill(case, np.random.default_rng(0))
        role, at = layout.roles[case.last], layout.device_offsets[case.last]
        assert offsets[2] + at + role.n_bytes == arena.numel()
        spans = sorted(
            (at, at + role.n_bytes)
            for at, role in zip(layout.device_offsets, layout.roles, strict=True)
        )
        assert spans[0][0] == 0 and all(
            a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)
        )
