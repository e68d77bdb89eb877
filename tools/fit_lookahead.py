"""Fit corrections of the early routers to a model's own texts; store them beside the model.

    python tools/fit_lookahead.py [-m MODEL.gguf] [-o OUT.npz] [--prompts FILE.json] [-n 128]
        [--vram 0.25]

Generates answers with room for a part of the experts, so that guesses are made when they are made
in use. Notes for every token and layer what its early router said, what the router ranked by in the
end, and what the layer's experts had read for the token before. A ridge regression per layer then
explains the difference. The runtime looks for `NAME.lookahead.npz` beside the model and can do
without. A part of the texts chooses the layers for which this helps, another is held out: recall in
the top k and 1.5 k is printed with and without the correction, each with the running drift. The
last line is JSON.
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
from aprefetch.plan import plan_model

__all__ = ["States", "fit", "main"]

F32 = npt.NDArray[np.float32]


class States(Lookahead):
    """A lookahead of depth 1 that notes what it sees."""

    noted: dict[int, dict[str, list[Any]]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "corrections": {}})
        self.noted = {}
        self._now: dict[int, Tensor] = {}  # by layer: its experts' input, for the latest token

    def look(self, layer: int, streams: Any, x: Any = None, next_scores: Any = None) -> Any:
        """As always; the experts' input is kept for the next token."""
        self._now[layer] = x[-1:].clone()
        return super().look(layer, streams, x, next_scores)

    def learn(self, layer: int, ranked: Callable[[], Tensor] | None) -> None:
        """As always; of single rows, note the pair of guess and truth."""
        seen = self._scored.get(layer, {}).get(layer - 1)
        before = self._now.get(layer)
        if seen is not None and ranked is not None and before is not None and len(seen) == 1:
            truth = ranked()
            if len(truth) == 1:
                rows = self.noted.setdefault(layer, {"early": [], "truth": [], "x": []})
                for name, value in (("early", seen), ("truth", truth), ("x", before)):
                    rows[name].append(value.cpu().numpy().astype(np.float32))
        super().learn(layer, ranked)


def ridge(features: F32, wanted: F32, strength: float) -> tuple[F32, F32]:
    """Weights `[F, E]` and bias `[E]`; the penalty is on standardised inputs."""
    mean, scale = features.mean(0), features.std(0) + 1e-6
    z = ((features - mean) / scale).astype(np.float64)
    bias = wanted.mean(0)
    gram = z.T @ z + strength * len(z) * np.eye(z.shape[1])
    weight = np.linalg.solve(gram, z.T @ (wanted - bias)) / scale[:, None]
    return weight.astype(np.float32), (bias - mean @ weight).astype(np.float32)


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


def _recalls(scores: F32, truth: F32, k: int) -> tuple[float, float]:
    return _recall(scores, truth, k, k), _recall(scores, truth, k, -(-3 * k // 2))


def fit(
    noted: dict[int, dict[str, F32]],
    k: int,
    strength: float,
    held_out: float = 0.25,
    choosing: float = 0.15,
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Arrays of the file, and recalls by layer on the last `held_out` of the tokens.

    The share `choosing` before them says for which layers a correction pays; only those get one.
    """
    arrays: dict[str, Any] = {}
    rows, kept = [], []
    for layer, parts in sorted(noted.items()):
        early, truth, x = parts["early"], parts["truth"], parts["x"]
        n = int(len(early) * (1 - held_out))
        n_fit = int(len(early) * (1 - held_out - choosing))
        weight, bias = ridge(x[:n_fit], (truth - early)[:n_fit], strength)
        plain, fixed = (_with_drift(s, truth) for s in (early, early + x @ weight + bias))
        pays = sum(_recalls(fixed[n_fit:n], truth[n_fit:n], k)) > sum(
            _recalls(plain[n_fit:n], truth[n_fit:n], k)
        )
        row: dict[str, float] = {"layer": layer, "n_tokens": len(early), "is_kept": pays}
        for name, scores in (
            ("plain", early),
            ("drift", plain),
            ("fitted", fixed if pays else plain),
        ):
            row[f"{name}@k"], row[f"{name}@1.5k"] = _recalls(scores[n:], truth[n:], k)
        rows.append(row)
        if pays:
            kept.append(layer)
            weight, bias = ridge(x, truth - early, strength)  # all of it, for the file
            arrays |= {f"weight_{layer}": weight, f"bias_{layer}": bias}
    meta = {"format": FORMAT, "layers": kept, "rows": len(next(iter(noted.values()))["x"])}
    arrays["meta"] = np.array(json.dumps(meta))
    return arrays, rows


async def collect(
    model: str | None, prompts: list[Any], n_tokens: int, share: float = 0.25
) -> tuple[Any, int]:
    """States by target layer over the answers to `prompts`, and the model's top-k.

    The device holds `share` of the experts (1: all).
    """
    plan = plan_model(Path(model or embedded.MODEL_PATH))
    budget = max(plan.vram_minimum_bytes, int(share * plan.vram_full_bytes))
    made: list[States] = []

    def make(*args: Any, **kwargs: Any) -> States:
        made.append(States(*args, **kwargs))
        return made[0]

    with mock.patch("aprefetch.loading.Lookahead", make):
        runtime = await Runtime.open(model, lookahead_depth=1, vram_budget=budget)
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
    parser.add_argument("--vram", type=float, default=0.25, help="share of experts that has room")
    parser.add_argument("--strength", type=float, default=0.1, help="of the penalty")
    args = parser.parse_args()
    prompts = json.loads(Path(args.prompts).read_text()) if args.prompts else list(PROMPTS)
    noted, top_k = asyncio.run(collect(args.model, prompts, args.max_tokens, args.vram))
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
        mark = "" if row["is_kept"] else "   left out"
        print(f"{row['layer']:>5}  " + "".join(f"{row[name]:13.3f}" for name in names) + mark)
    mean = {name: float(np.mean([row[name] for row in rows])) for name in names}
    print("mean   " + "".join(f"{mean[name]:13.3f}" for name in names))
    n_bytes = out.stat().st_size
    print(f"{rows[0]['n_tokens']} tokens; wrote {out} ({n_bytes} bytes)")
    print(json.dumps({"output": str(out), "mean": mean, "layers": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
