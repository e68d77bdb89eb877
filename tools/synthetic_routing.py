"""Routing of models that are too large to run, with the statistics of a recorded trace.

Each expert of a layer has a standing popularity and a state that drifts from token to token; a
token picks the best k of their sum. Early routers see the same scores through noise. Four numbers
say how: `skew` (spread of popularity), `drift` (how much of the state stays from one token to the
next), `swing` (how much drift differs from token to token, for all layers alike: what makes the
reuse of one layer correlate with that of the next) and the noise of guesses at each depth. `fit`
finds them, so that routing made with the trace's own sizes shows the trace's own use, reuse,
correlation between layers, and recall.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aprefetch.routing_trace import CALL, FORMAT_VERSION, GUESS, PICK, STEP, RoutingTrace

__all__ = ["GEOMETRIES", "Fitted", "Geometry", "Statistics", "fit", "generate", "measure"]

MXFP4_ROLE = 2048 * 4096 // 32 * 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a model. `token_routed` layers know their experts from the token: no drift."""

    name: str
    layers: tuple[int, ...]
    token_routed: tuple[int, ...]
    n_experts: int
    top_k: int
    role_bytes: tuple[int, int, int]


GEOMETRIES: Mapping[str, Geometry] = {
    "v4-flash": Geometry(
        name="DeepSeek-V4-Flash, MXFP4",
        layers=tuple(range(43)),
        token_routed=(0, 1, 2),
        n_experts=256,
        top_k=6,
        role_bytes=(MXFP4_ROLE,) * 3,
    ),
    "kimi-k3": Geometry(
        name="Kimi-K3, Q2_K/Q2_K/Q3_K",
        layers=tuple(range(1, 93)),
        token_routed=(),
        n_experts=896,
        top_k=16,
        role_bytes=(3_612_672, 3_612_672, 4_730_880),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of decoded tokens in layers with a router.

    `use_spread`: standard deviation over mean of how often experts are used. `reuse`: share of
    picks that the token before had picked too. `correlation`: of the reuse of neighbouring layers,
    token by token. `recall`: by depth, share of picks among the first k guesses.
    """

    use_spread: float
    reuse: float
    correlation: float
    recall: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """See the module's text."""

    skew: float
    drift: float
    swing: float
    noise: dict[int, float]


def measure(trace: RoutingTrace) -> Statistics:
    """Statistics of a trace."""
    k = int(trace.meta["num_experts_per_tok"])
    token_routed = set(trace.meta["token_routed_layers"])
    layers = [layer for layer in trace.layers if layer not in token_routed]
    picks: dict[int, list[npt.NDArray[np.int64]]] = {layer: [] for layer in layers}
    guessed: dict[tuple[int, int], list[int]] = {}
    found: dict[int, list[float]] = {}
    for i, row in enumerate(trace.calls):
        if row["n_rows"] != 1:
            continue
        layer = int(row["layer"])
        chosen = trace.picked(i)["expert"].astype(np.int64)
        if layer in picks:
            picks[layer].append(chosen)
            for depth in range(1, 4):
                guess = guessed.pop((layer, depth), None)
                if guess is not None:
                    found.setdefault(depth, []).append(len(set(guess[:k]) & set(chosen)) / k)
        rows = trace.guessed(i)
        for target in np.unique(rows["layer"]):
            mine = rows["expert"][rows["layer"] == target].tolist()
            guessed[int(target), int(target) - layer] = mine
    tables = np.stack([np.stack(picks[layer]) for layer in layers])  # [L, T, k]
    recall = {depth: float(np.mean(values)) for depth, values in found.items()}
    return _statistics(tables, int(trace.meta["n_experts"]), recall)


def _statistics(
    tables: npt.NDArray[np.int64], n_experts: int, recall: dict[int, float]
) -> Statistics:
    n_layers, n_tokens, k = tables.shape
    spread, shares = [], []
    for table in tables:
        use = np.bincount(table.ravel(), minlength=n_experts)
        # What even use would show by chance is no skew.
        chance = use.mean() * (1 - k / n_experts)
        spread.append(np.sqrt(max(0.0, use.var() - chance)) / use.mean())
        hot = np.zeros((n_tokens, n_experts), bool)
        np.put_along_axis(hot, table, True, axis=1)
        shares.append((hot[1:] & hot[:-1]).sum(1) / k)
    reuse = np.stack(shares)
    pairs = [np.corrcoef(a, b)[0, 1] for a, b in zip(reuse[:-1], reuse[1:], strict=True)]
    return Statistics(
        use_spread=float(np.mean(spread)),
        reuse=float(reuse.mean()),
        correlation=float(np.mean(pairs)) if n_layers > 1 else 0.0,
        recall=recall,
    )


def _scores(
    rng: np.random.Generator, n_layers: int, n_tokens: int, n_experts: int, fitted: Fitted
) -> npt.NDArray[np.float32]:
    """[T, L, E]"""
    popularity = fitted.skew * rng.standard_normal((n_layers, n_experts), np.float32)
    state = rng.standard_normal((n_layers, n_experts), np.float32)
    out = np.empty((n_tokens, n_layers, n_experts), np.float32)
    for t in range(n_tokens):
        stays = np.clip(fitted.drift + fitted.swing * rng.standard_normal(), 0.0, 0.999)
        fresh = rng.standard_normal((n_layers, n_experts), np.float32)
        state = np.float32(stays) * state + np.float32(np.sqrt(1 - stays**2)) * fresh
        out[t] = popularity + state
    return out


def _best(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    return np.sort(np.argpartition(-scores, k - 1, axis=-1)[..., :k], axis=-1)


def fit(trace: RoutingTrace, *, n_tokens: int = 600) -> Fitted:
    """Numbers that reproduce the trace's statistics at its own sizes. Deterministic."""
    wanted = measure(trace)
    n_experts, k = int(trace.meta["n_experts"]), int(trace.meta["num_experts_per_tok"])
    n_layers = len(trace.layers) - len(trace.meta["token_routed_layers"])

    def made(skew: float, drift: float, swing: float) -> Statistics:
        rng = np.random.default_rng(5)
        fitted = Fitted(skew=skew, drift=drift, swing=swing, noise={})
        scores = _scores(rng, n_layers, n_tokens, n_experts, fitted)
        return _statistics(_best(scores, k).transpose(1, 0, 2), n_experts, {})

    skew = drift = swing = 0.1
    for _ in range(3):
        skew = _solve(lambda x: made(x, drift, swing).use_spread, wanted.use_spread, 0.0, 2.0)  # noqa: B023
        drift = _solve(lambda x: made(skew, x, swing).reuse, wanted.reuse, 0.0, 0.999)  # noqa: B023
        swing = _solve(lambda x: made(skew, drift, x).correlation, wanted.correlation, 0.0, 0.8)  # noqa: B023
    drift = _solve(lambda x: made(skew, x, swing).reuse, wanted.reuse, 0.0, 0.999)
    fitted = Fitted(skew=skew, drift=drift, swing=swing, noise={})
    scores = _scores(np.random.default_rng(5), n_layers, n_tokens, n_experts, fitted)
    truth = _best(scores, k)
    blur = np.random.default_rng(6).standard_normal(scores.shape, np.float32)

    def recall(noise: float) -> float:
        return -_overlap(truth, _best(scores + np.float32(noise) * blur, k), n_experts)

    noise = {d: _solve(recall, -r, 0.0, 8.0) for d, r in wanted.recall.items()}
    return Fitted(skew=skew, drift=drift, swing=swing, noise=noise)


def _overlap(truth: npt.NDArray[np.int64], guess: npt.NDArray[np.int64], n_experts: int) -> float:
    hot = np.zeros((*truth.shape[:-1], n_experts), bool)
    np.put_along_axis(hot, truth, True, axis=-1)
    return float(np.take_along_axis(hot, guess, axis=-1).mean())


def _solve(value: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a rising function is `wanted`, by halving."""
    for _ in range(12):
        middle = (low + high) / 2
        if value(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def generate(geometry: Geometry, fitted: Fitted, *, n_tokens: int, seed: int) -> RoutingTrace:
    """A trace of `n_tokens` decoded tokens, with guesses of twice the layer's k at each depth."""
    rng = np.random.default_rng(seed)
    n_layers, n_experts, k = len(geometry.layers), geometry.n_experts, geometry.top_k
    scores = _scores(rng, n_layers, n_tokens, n_experts, fitted)
    even = [i for i, layer in enumerate(geometry.layers) if layer in geometry.token_routed]
    scores[:, even] = rng.standard_normal((n_tokens, len(even), n_experts), np.float32)
    picks = _best(scores, k)
    guesses: dict[int, npt.NDArray[np.int64]] = {}
    for depth, noise in sorted(fitted.noise.items()):
        seen = scores + np.float32(noise) * rng.standard_normal(scores.shape, np.float32)
        width = min(2 * k, n_experts)
        part = np.argpartition(-seen, width - 1, axis=-1)[..., :width]
        order = np.argsort(-np.take_along_axis(seen, part, axis=-1), axis=-1)
        guesses[depth] = np.take_along_axis(part, order, axis=-1)
    calls, guess_rows = [], []
    for t in range(n_tokens):
        for i, layer in enumerate(geometry.layers):
            first = len(guess_rows)
            for depth, table in guesses.items():
                target = i + depth
                if target < n_layers and geometry.layers[target] not in geometry.token_routed:
                    named = table[t, target].tolist()
                    guess_rows += [(geometry.layers[target], e, r) for r, e in enumerate(named)]
            at = (t * n_layers + i) * k
            n_guesses = len(guess_rows) - first
            calls.append((t, layer, 1, at, k, first, n_guesses, 0, 0, 0, 0, 0))
    pick_rows = np.zeros(picks.size, PICK)
    pick_rows["expert"], pick_rows["n_rows"], pick_rows["tier"] = picks.ravel(), 1, 3
    steps = np.zeros(n_tokens, STEP)
    steps["n_rows"] = 1
    return RoutingTrace(
        meta=_meta(geometry),
        steps=steps,
        calls=np.array(calls, CALL),
        picks=pick_rows,
        guesses=np.array(guess_rows, GUESS),
    )


def _meta(geometry: Geometry) -> dict[str, object]:
    payload = sum(geometry.role_bytes)
    return {
        "format": FORMAT_VERSION,
        "model": geometry.name,
        "n_layers": max(geometry.layers) + 1,
        "n_experts": geometry.n_experts,
        "num_experts_per_tok": geometry.top_k,
        "token_routed_layers": list(geometry.token_routed),
        "object_bytes": {str(n): payload for n in geometry.layers},
        "role_bytes": {str(n): list(geometry.role_bytes) for n in geometry.layers},
        "landing_bytes": {str(n): -(-payload // 4096) * 4096 for n in geometry.layers},
        "reads_per_object": 1,
        "alignment": 4096,
    }
