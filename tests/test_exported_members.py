"""What `import aprefetch` offers: exactly the documented names, each importable, and cheaply."""

from __future__ import annotations

import subprocess
import sys

import aprefetch
from aprefetch import errors

PUBLIC = {
    "Runtime", "RuntimeConfig", "SamplingParams", "Completion", "TokenEvent", "TokenStream",
    "FinishReason", "Stats", "ScoreResult", "build_pack", "inspect", "open_pack", "__version__",
}  # fmt: skip


def test_all_lists_exactly_the_public_surface() -> None:
    assert set(aprefetch.__all__) == PUBLIC | set(errors.__all__)
    assert len(set(aprefetch.__all__)) == len(aprefetch.__all__)


def test_every_name_is_there() -> None:
    for name in aprefetch.__all__:
        assert getattr(aprefetch, name) is not None
        assert name in dir(aprefetch)
    assert not hasattr(aprefetch, "nonsense")


def test_every_public_error_is_ours() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(aprefetch, name), aprefetch.AprefetchError)


def test_importing_is_cheap() -> None:
    code = (
        "import sys, aprefetch, aprefetch.cli.main as m; m.build_parser();"
        "print(sorted({'torch', 'numpy', 'numba', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
