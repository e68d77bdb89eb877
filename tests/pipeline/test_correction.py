"""Fitted corrections: found, applied, and harmless when they are wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from fit_lookahead import fit, ridge

from aprefetch.config import LookaheadConfig
from aprefetch.pipeline.correction import load_corrections, path_beside
from aprefetch.pipeline.lookahead import Lookahead, RoutedLayer
from aprefetch.stats import Counters

LAYERS = {n: RoutedLayer(n_experts=8, top_k=2) for n in range(3)}


def save(path, **arrays) -> None:
    meta = arrays.pop("meta", {"format": 2, "layers": [1], "rows": 4})
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays)


def lookahead(path) -> Lookahead:
    routers = {n: lambda streams: streams[:, 0, :8] for n in (1, 2)}
    corrections = load_corrections(path, "cpu")
    return Lookahead(routers, LAYERS, LookaheadConfig(width=2), Counters(), corrections=corrections)


STREAMS = torch.arange(8.0).flip(0)[None, None]  # expert 0 first
X = torch.ones(1, 4)


def a_token(ahead: Lookahead, x: torch.Tensor | None = X) -> list[tuple[int, list[int]]]:
    """Guesses of one token for layers 1 and 2."""
    guesses = ahead.predict(0, STREAMS, x) + ahead.predict(1, STREAMS, x)
    ahead.predict(2, STREAMS, x)
    ahead.forget()
    return guesses


def test_a_correction_adds_what_the_token_before_says(tmp_path) -> None:
    weight = np.zeros((4, 8), np.float32)
    weight[0, 6], weight[3, 7] = 20.0, 30.0
    save(tmp_path / "a.npz", weight_1=weight, bias_1=np.zeros(8, np.float32))
    ahead = lookahead(tmp_path / "a.npz")
    plain = [(1, [0, 1]), (2, [0, 1])]
    assert a_token(ahead) == plain  # there was no token before
    assert a_token(ahead) == [(1, [7, 6]), (2, [0, 1])]  # none for layer 2
    assert a_token(ahead, torch.zeros(1, 4)) == [(1, [7, 6]), (2, [0, 1])]
    assert a_token(ahead) == plain
    rows = STREAMS.expand(3, 1, 8)
    assert ahead.predict(0, rows, X.expand(3, 4)) == [(1, [0, 1])]  # single rows only
    prompt = torch.tensor([[0.0] * 4, [0.0, 0, 0, 1.0]])
    ahead.predict(1, rows[:2], prompt)  # a prompt's last row is the token before
    ahead.forget()
    assert ahead.predict(0, STREAMS, X) == [(1, [7, 0])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arrays",
    [
        {"weight_1": np.zeros((4, 8)), "bias_1": np.zeros(7)},
        {"weight_1": np.full((4, 8), np.nan), "bias_1": np.zeros(8)},
        {"weight_1": np.zeros((4, 8))},
        {"meta": {"format": 1, "layers": []}},
        {"meta": {"format": 9, "layers": []}},
        {"meta": [], "weight_1": np.zeros(3)},
    ],
)
def test_files_of_no_use_are_left_out(tmp_path, caplog, arrays) -> None:
    save(tmp_path / "a.npz", **arrays)
    assert load_corrections(tmp_path / "a.npz", "cpu") == {}
    assert "left out" in caplog.text


def test_missing_damaged_and_foreign_files_are_left_out(tmp_path, caplog) -> None:
    assert load_corrections(tmp_path / "none.npz", "cpu") == {}
    assert caplog.text == ""
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and no more")
    assert load_corrections(tmp_path / "a.npz", "cpu") == {}
    save(tmp_path / "b.npz", weight_1=np.ones((40, 32)), bias_1=np.ones(32))  # another model's
    ahead = lookahead(tmp_path / "b.npz")
    for _ in range(3):
        assert a_token(ahead) == [(1, [0, 1]), (2, [0, 1])]
    assert caplog.text.count("other sizes") == 1


def test_the_place_beside_the_model(tmp_path) -> None:
    assert path_beside(tmp_path / "m-00001-of-00004.gguf").name == (
        "m-00001-of-00004.lookahead.npz"
    )


def test_drift_learns_what_predictions_are_short_of() -> None:
    routers = {1: lambda streams: streams[:, 0, :8]}
    ahead = Lookahead(routers, LAYERS, LookaheadConfig(width=2), Counters())
    truth = STREAMS[0] + torch.tensor([[0, 0, 0, 0, 0, 0, 20.0, 30.0]])
    assert ahead.predict(0, STREAMS) == [(1, [0, 1])]
    ahead.learn(1, lambda: truth)
    ahead.observe(1, [6, 7])
    assert ahead.predict(0, STREAMS) == [(1, [7, 6])]
    ahead.forget()
    ahead.learn(1, lambda: truth)  # nothing was predicted: nothing to learn


def test_the_fit_finds_a_linear_relation() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 4)).astype(np.float32)
    early = rng.standard_normal((400, 8)).astype(np.float32)
    truth = early + 3 * x[:, :1] * np.arange(8, dtype=np.float32)
    same = early.copy()
    noted = {n: {"early": early, "truth": t, "x": x} for n, t in ((1, truth), (2, same))}
    arrays, rows = fit(noted, 2, 0.001)
    assert rows[0]["fitted@k"] > 0.95 > rows[0]["plain@k"]
    assert arrays["weight_1"].shape == (4, 8)
    assert json.loads(str(arrays["meta"]))["layers"] == [1]  # nothing to gain for layer 2
    assert rows[1]["fitted@k"] == rows[1]["drift@k"]
    weight, bias = ridge(x, x @ np.ones((4, 2), np.float32) + 1, 1e-6)
    assert np.allclose(weight, 1, atol=1e-3) and np.allclose(bias, 1, atol=1e-3)
