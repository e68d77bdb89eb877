"""Record the small routing trace that tests and examples use, on the model in the package.

    python tools/record_routing.py [OUT.npz] [--max-tokens N] [--seed N]

The same as `aprefetch trace record` over its built-in prompts (stories, questions, old prose,
code-like text, a long context), with everything in memory so that times are those of compute, and
guesses three layers ahead. Kernels differ in the last bits, so another machine may sample other
tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aprefetch.cli.main import main as aprefetch

DEFAULT = Path(__file__).parent.parent / "tests" / "data" / "routing" / "ember-47m.npz"


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", default=str(DEFAULT))
    parser.add_argument("--max-tokens", default="72")
    parser.add_argument("--seed", default="1")
    args = parser.parse_args()
    sampling = ["--temp", "0.7", "--top-p", "0.9", "--seed", args.seed, "--ignore-eos"]
    budgets = ["--vram-budget", "40MB", "--ram-budget", "40MB", "--lookahead", "3"]
    out = ["-o", args.out, "-n", args.max_tokens, "--no-loads"]
    return aprefetch(["trace", "record", *out, *sampling, *budgets])


if __name__ == "__main__":
    raise SystemExit(main())
