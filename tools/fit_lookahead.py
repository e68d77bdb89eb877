"""Fit corrections of the early routers to a model's own texts; store them beside the model.

    python tools/fit_lookahead.py [-m MODEL.gguf] [-o OUT.npz] [--prompts FILE.json] [-n 128]

Generates answers, and notes for every token and layer what the next layer's early router said, what
that router ranked by in the end, and what the layer's experts read and were. A ridge regression per
layer then explains the difference. The runtime looks for `NAME.lookahead.npz` beside the model
and can do without. A part of the texts is held out: recall in the top k and 1.5 k is printed with
and without the correction, each with the running drift. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aprefetch import Runtime, embedded
from aprefetch.cli.trace import PROMPTS
from aprefetch.pipeline.correction import FORMAT, path_beside
from aprefetch.pipeline.lookahead import DRIFT_WEIGHT, Lookahead

__all__ = ["States", "fit", "main"]

F32 = npt.NDArray[np.float32]


class States(Lookahead):
    """A lookahead of depth 1 that notes what it sees."""

    noted: dict[int, dict[str, list[Any]]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "corrections": {}})
        self.noted = {}
        self._before: dict[int, tuple[Tensor, npt.NDArray[np.int32]]] = {}

    def look(self, layer: int, streams: Tensor, x: Any = None, ids: Any = None) -> Any:
        """As always; the experts' input and picks are kept for the next layer."""
        self._before[layer + 1] = (x, ids)
        return super().look(layer, streams, x, ids)

    def learn(self, layer: int, ranked: Callable[[], Tensor] | None) -> None:
        """As always; note the pair of guess and truth."""
        seen = self._scored.get(layer, {}).get(layer - 1)
        before = self._before.pop(layer, None)
        if seen is not None and ranked is not None and before is not None:
            truth, (x, ids) = ranked(), before
            if len(seen) == len(truth) == len(x):
                rows = self.noted.setdefault(layer, {"early": [], "truth": [], "x": [], "ids": []})
                for name, value in (("early", seen), ("truth", truth), ("x", x)):
                    rows[name].append(value.cpu().numpy().astype(np.float32))
                rows["ids"].append(ids.astype(np.int64))
        super().learn(layer, ranked)


def ridge(features: F32, wanted: F32, strength: float) -> tuple[F32, F32]:
    """Weights `[F, E]` and bias `[E]`; the penalty is on standardised inputs."""
    mean, scale = features.mean(0), features.std(0) + 1e-6
    z = ((features - mean) / scale).astype(np.float64)
    bias = wanted.mean(0)
    gram = z.T @ z + strength * len(z) * np.eye(z.shape[1])
    weight = np.linalg.solve(gram, z.T @ (wanted - bias)) / scale[:, None]
    return weight.astype(np.float32), (bias - mean @ weight).astype(np.float32)


def _features(x: F32, ids: npt.NDArray[np.int64], n_experts: int) -> F32:
    hot = np.zeros((len(ids), n_experts), np.float32)
    np.put_along_axis(hot, ids, 1.0, axis=1)
    return np.concatenate([x, hot], axis=1)


def _recall(scores: F32, truth: F32, k: int, width: int) -> float:
    wanted = np.argsort(-truth, axis=1, kind="stable")[:, :k]
    named = np.argsort(-scores, axis=1, kind="stable")[:, :width]
    return float((wanted[:, :, None] == named[:, None, :]).any(2).mean())


def _with_drift(scores: F32, truth: F32) -> F32:
    out, drift = np.empty_like(scores), np.zeros(scores.shape[1], np.float32)
    for i in range(len(scores)):
        out[i] = scores[i] + drift
        drift += DRIFT_WEIGHT * (truth[i] - scores[i] - drift)
    return out


def fit(
    noted: dict[int, dict[str, F32]], k: int, strength: float, held_out: float = 0.25
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Arrays of the file, and recalls by layer on the last `held_out` of the tokens."""
    arrays: dict[str, Any] = {}
    rows = []
    for layer, parts in sorted(noted.items()):
        early, truth = parts["early"], parts["truth"]
        features = _features(parts["x"], parts["ids"], early.shape[1])
        n = int(len(early) * (1 - held_out))
        weight, bias = ridge(features[:n], (truth - early)[:n], strength)
        fixed = early + features @ weight + bias
        row: dict[str, float] = {"layer": layer, "n_tokens": len(early)}
        wide = -(-3 * k // 2)
        for name, scores in (
            ("plain", early),
            ("drift", _with_drift(early, truth)),
            ("fitted", _with_drift(fixed, truth)),
        ):
            row[f"{name}@k"] = _recall(scores[n:], truth[n:], k, k)
            row[f"{name}@1.5k"] = _recall(scores[n:], truth[n:], k, wide)
        rows.append(row)
        weight, bias = ridge(features, truth - early, strength)  # all of it, for the file
        arrays |= {f"weight_{layer}": weight, f"bias_{layer}": bias}
    meta = {"format": FORMAT, "layers": sorted(noted), "rows": len(next(iter(noted.values()))["x"])}
    arrays["meta"] = np.array(json.dumps(meta))
    return arrays, rows


async def collect(model: str | None, prompts: list[Any], n_tokens: int) -> tuple[Any, int]:
    """States by target layer over the answers to `prompts`, and the model's top-k."""
    made: list[States] = []

    def make(*args: Any, **kwargs: Any) -> States:
        made.append(States(*args, **kwargs))
        return made[0]

    with mock.patch("aprefetch.runtime.Lookahead", make):
        runtime = await Runtime.open(model, lookahead_depth=1, lookahead_max_rows=4096)
    try:
        # Widths are of no interest, and sleeping would lose tokens.
        made[0].pace = None
        for seed, prompt in enumerate(prompts):
            await runtime.generate(
                prompt, max_tokens=n_tokens, temperature=0.8, top_p=0.95, seed=seed, ignore_eos=True
            )
        top_k = runtime.model_info.num_experts_per_tok
    finally:
        await runtime.aclose()
    join = functools.partial(np.concatenate, axis=0)
    noted = {
        layer: {name: join(values) for name, values in rows.items()}
        for layer, rows in made[0].noted.items()
    }
    return noted, top_k


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="GGUF file (default: built-in)")
    parser.add_argument("-o", "--output", help="default: NAME.lookahead.npz beside the model")
    parser.add_argument("--prompts", help="JSON list of prompts (default: built-in)")
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--strength", type=float, default=0.1, help="of the penalty")
    args = parser.parse_args()
    prompts = json.loads(Path(args.prompts).read_text()) if args.prompts else list(PROMPTS)
    noted, top_k = asyncio.run(collect(args.model, prompts, args.max_tokens))
    if not noted:
        print("no layer of this model has a router to look ahead with", file=sys.stderr)
        return 1
    arrays, rows = fit(noted, top_k, args.strength)
    out = Path(args.output or path_beside(Path(args.model or embedded.MODEL_PATH)))
    with out.open("wb") as file:
        np.savez_compressed(file, **arrays)
    names = [name for name in rows[0] if "@" in name]
    print("layer  " + "".join(f"{name:>13}" for name in names))
    for row in rows:
        print(f"{row['layer']:>5}  " + "".join(f"{row[name]:13.3f}" for name in names))
    mean = {name: float(np.mean([row[name] for row in rows])) for name in names}
    print("mean   " + "".join(f"{mean[name]:13.3f}" for name in names))
    n_bytes = out.stat().st_size
    print(f"{rows[0]['n_tokens']} tokens; wrote {out} ({n_bytes} bytes)")
    print(json.dumps({"output": str(out), "mean": mean, "layers": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
