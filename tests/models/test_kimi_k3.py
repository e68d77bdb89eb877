"""Kimi-K3 and Kimi-Linear without any oracle file: against plain numpy in float64.

The random models have every structural element and each optional part left out once. Float32 stays
within 2e-4 of float64 on logits of order one; a wrong ingredient moves them by tenths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kimi_truth import KimiTruth
from make_tiny_kimi import TINY_LINEAR, KimiConfig, write_kimi
from resident import Resident

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.models.base import Chunk

# All widths differ, so that no two can be mixed up; floats, so that no block size is in the way.
ODD = KimiConfig(
    hidden=96, dense_width=72, n_vocab=300, latent=48, width=80, value=20, n_experts=12,
    gate_type="F32", down_type="F32", matrix_type="F32", narrow_type="F32",
)  # fmt: skip
ODD_LINEAR = replace(
    TINY_LINEAR,
    hidden=96, dense_width=72, n_vocab=300, width=80, value=20, n_experts=12,
    gate_type="F32", down_type="F32", matrix_type="F32", narrow_type="F32",
)  # fmt: skip
MODELS = {
    "k3": KimiConfig(),
    "linear": TINY_LINEAR,
    "odd": ODD,
    "odd-linear": ODD_LINEAR,
    "mxfp4": KimiConfig(gate_type="MXFP4", down_type="MXFP4", n_layers=4),
    "plain-residuals": replace(ODD, residual_block=0),
    "every-layer-banks": replace(ODD, residual_block=1, n_layers=4),
    "experts-of-full-width": replace(ODD, latent=0, has_routed_norm=False),
    "no-shared-expert": replace(ODD, n_shared=0, has_gate=False),
    "groups": replace(ODD, n_groups=4, n_used_groups=2, normalise=False, scale=1.0),
    "no-dense-layer": replace(ODD, n_dense=0, mla=(0, 1), n_layers=4),
    "unbounded-gate": replace(ODD, lower_bound=None, taps=3),
    "full-rank-queries": replace(ODD, q_rank=0, situ=(2.0, 3.0)),
    "joined-keys-and-values": replace(ODD, has_kv_b=True),
    "fused-inputs": replace(ODD_LINEAR, has_qkv=True, has_kv_b=True),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Path of a model by name, written once."""
    folder, written = tmp_path_factory.mktemp("kimi"), {}

    def path(name: str):
        if name not in written:
            written[name] = write_kimi(folder / f"{name}.gguf", MODELS[name])[0]
        return written[name]

    return path


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(7).integers(0, 300, 40).tolist()


@pytest.fixture(scope="module", params=["numba", "reference"])
def ops(request):
    return cpu_ops(request.param, 1)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_expert_choices(files, ids, ops, name):
    if name not in ("odd", "odd-linear") and ops.name == "reference":
        pytest.skip("the reference kernels are slow; the choice of parts is the model's")
    truth = KimiTruth(files(name))
    wanted = truth.logits(ids)
    seen: dict[int, np.ndarray] = {}
    ours = Resident(files(name), ops).logits(ids, 0, seen).numpy()
    assert wanted.std() > 0.5
    np.testing.assert_allclose(ours, wanted, atol=2e-4)
    for layer, chosen in truth.chosen.items():
        assert [sorted(row) for row in chosen] == seen[layer].tolist()


@pytest.mark.parametrize("name", ["odd", "odd-linear"])
def test_expert_weights(files, ids, name, monkeypatch):
    """The routed norm hides a wrong scale from the logits."""
    ops, truth, seen = cpu_ops("reference"), KimiTruth(files(name)), []
    inner = ops.route_sigmoid

    def watched(*args, **kwargs):
        seen.append(inner(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(ops, "route_sigmoid", watched)
    Resident(files(name), ops).logits(ids)
    truth.logits(ids)
    for (_, weights), chosen in zip(seen, truth.chosen.values(), strict=True):
        theirs = [[row[e] for e in sorted(row)] for row in chosen]
        np.testing.assert_allclose(weights.numpy(), theirs, atol=1e-5)


@pytest.mark.parametrize("name", ["odd", "odd-linear", "k3", "linear"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 39])
def test_chunks(files, ids, ops, name, chunk):
    if ops.name == "reference" and (name in ("k3", "linear") or chunk == 1):
        pytest.skip("slow")
    resident = Resident(files(name), ops)
    whole, parts = resident.logits(ids), resident.logits(ids, chunk)
    if ops.batch_invariant:
        assert torch.equal(whole, parts)
    else:
        torch.testing.assert_close(parts, whole, rtol=0, atol=2e-4)


def test_sequences_do_not_share_state(files, ids, ops):
    """Steps of two sequences interleaved, one of them ragged, beside a third that is given up."""
    resident = Resident(files("odd"), ops)
    other = ids[::-1]
    a, b, lost = (resident.model.new_state() for _ in range(3))
    first = resident.step(
        [Chunk(a, np.array(ids[:9]), "all"), Chunk(b, np.array(other[:20]), "all")]
    )
    resident.step([Chunk(b, np.array(other[20:21])), Chunk(a, np.array(ids[9:12]))])
    abandoned = resident.model.forward([Chunk(lost, np.array(ids))])
    for _ in range(5):
        next(abandoned)
    abandoned.close()
    last = resident.step([Chunk(a, np.array(ids[12:]), "all"), Chunk(b, np.array(other[21:]))])
    ours = torch.cat([first[0], last[0]])
    whole, whole_other = resident.logits(ids), resident.logits(other)
    expected = torch.cat([whole[:9], whole[12:]])
    pairs = [(ours, expected), (first[1], whole_other[:20]), (last[1], whole_other[-1:])]
    for got, wanted in pairs:
        if ops.batch_invariant:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)
    assert a.n_tokens == b.n_tokens == len(ids)


def test_logits_only_where_wanted(files, ids):
    resident = Resident(files("odd"), cpu_ops("numba", 1))
    kinds = ["last", "none", "all"]
    states = [resident.model.new_state() for _ in kinds]
    last, none, everything = resident.step(
        [Chunk(s, np.array(ids), k) for s, k in zip(states, kinds, strict=True)]
    )
    assert none is None
    assert torch.equal(last, everything[-1:])
    state = resident.model.new_state()
    assert resident.step([Chunk(state, np.array(ids), "none")]) == [None]


def test_state_sizes_are_as_declared(files, ids):
    for name in ("k3", "linear"):
        resident = Resident(files(name), cpu_ops("numba", 1))
        info, config = resident.model.info, MODELS[name]
        state = resident.model.new_state()
        assert state.n_bytes == info.state_bytes_fixed > 0
        resident.step([Chunk(state, np.array(ids * 2), "none")])
        n_mla = len(config.mla)
        assert info.state_bytes_per_token == n_mla * (config.kv_rank + config.pe) * 4
        assert state.n_bytes == info.state_bytes_fixed + 80 * info.state_bytes_per_token


def test_early_routers_rank_as_the_router_does(files, ids):
    """Given the very streams that a layer's router reads, the guess is what the router picks."""
    resident = Resident(files("k3"), cpu_ops("numba", 1))
    model = resident.model
    assert sorted(model.early_routers) == list(range(1, 7)) == list(model.info.routed_layers)
    forward = model.forward([Chunk(model.new_state(), np.array(ids))])
    n_seen = 0
    while True:
        try:
            call = next(forward)
        except StopIteration:
            break
        if call.finishing:
            call.run(resident.arena, resident.leases(call))
            continue
        scores = model.early_routers[call.layer](call.streams)
        picked = scores.topk(call.top_k, dim=1).indices.sort(dim=1).values
        assert picked.tolist() == call.ids.tolist()
        # Later layers can be guessed from the same streams, across a bank as well.
        for layer in range(call.layer + 1, 7):
            assert model.early_routers[layer](call.streams[:1]).shape == (1, 16)
        n_seen += 1
    assert n_seen == 6


def test_no_layer_is_routed_by_token(files):
    model = Resident(files("odd"), cpu_ops("reference")).model
    assert model.info.token_routed_layers == ()
    assert model.token_routed(1, np.array([1])) is None


def test_any_shard_opens_the_model(tmp_path, files, ids):
    shards = write_kimi(tmp_path / "set.gguf", MODELS["odd"], shards=5)
    whole = Resident(files("odd"), cpu_ops("numba", 1)).logits(ids[:5])
    for path in (shards[0], shards[3]):
        assert torch.equal(Resident(path, cpu_ops("numba", 1)).logits(ids[:5]), whole)
