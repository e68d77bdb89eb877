"""Kimi-K3 and Kimi-Linear once more: plain numpy in float64, one token at a time, nothing shared
with the package. Reads a single GGUF with the public reader; no cache, no batching, no chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class KimiTruth:
    """`logits(ids)` of all positions, and `chosen[layer]`, the experts with their weights."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.arch = str(reader.fields["general.architecture"].contents())
        self.keys = {
            name.removeprefix(self.arch + "."): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(self.arch + ".")
        }
        self.weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type)
            .reshape([int(n) for n in t.shape[::-1]])
            .astype(np.float64)
            for t in reader.tensors
        }
        self.eps = self.keys["attention.layer_norm_rms_epsilon"]
        self.chosen: dict[int, list[dict[int, float]]] = {}

    def key(self, name: str, default: Any = None) -> Any:
        return self.keys.get(name, default)

    def rms(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def act(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        if self.arch == "kimi-linear":
            return gate * sigmoid(gate) * up
        beta, linear = self.keys["activation.situ_beta"], self.keys["activation.situ_linear_beta"]
        return beta * np.tanh(gate / beta) * sigmoid(gate) * linear * np.tanh(up / linear)

    def mix(self, total: np.ndarray, bank: list[np.ndarray], score: np.ndarray) -> np.ndarray:
        if not bank:
            return total
        rows = np.stack([*bank, total])
        z = (rows * score).sum(1) / np.sqrt((rows * rows).mean(1) + self.eps)
        p = np.exp(z - z.max())
        return (p / p.sum()) @ rows

    def logits(self, ids: list[int]) -> np.ndarray:
        w, block = self.weights, self.key("attn_res.block_size", 0)
        n_layers = self.keys["block_count"]
        totals = [w["token_embd.weight"][i] for i in ids]
        banks: list[list[np.ndarray]] = [[] for _ in ids]
        self.chosen = {}
        for layer in range(n_layers):
            p = f"blk.{layer}."
            if block:
                score = w[p + "attn_res_score.weight"]
                mixed = [self.mix(t, b, score) for t, b in zip(totals, banks, strict=True)]
            else:
                mixed = totals
            x = self.rms(np.stack(mixed), w[p + "attn_norm.weight"])
            is_mla = self.keys["attention.head_count_kv"][layer] > 0
            y = self.latent_attention(p, x) if is_mla else self.delta_attention(p, x)
            for i in range(len(ids)):
                if block and layer % block == 0:
                    banks[i].append(totals[i])
                    totals[i] = y[i]
                else:
                    totals[i] = totals[i] + y[i]
                f = self.mix(totals[i], banks[i], w[p + "ffn_res_score.weight"]) if block else None
                f = self.rms(totals[i] if f is None else f, w[p + "ffn_norm.weight"])
                if p + "ffn_gate.weight" in w:
                    totals[i] = totals[i] + self.mlp(p, "", f)
                else:
                    totals[i] = totals[i] + self.experts(layer, f)
        if block:
            score = w["output_res_score.weight"]
            totals = [self.mix(t, b, score) for t, b in zip(totals, banks, strict=True)]
        return self.rms(np.stack(totals), w["output_norm.weight"]) @ w["output.weight"].T

    def mlp(self, p: str, suffix: str, x: np.ndarray) -> np.ndarray:
        gate, up, down = (
            self.weights[f"{p}ffn_{r}{suffix}.weight"] for r in ("gate", "up", "down")
        )
        return down @ self.act(gate @ x, up @ x)

    def experts(self, layer: int, x: np.ndarray) -> np.ndarray:
        w, p = self.weights, f"blk.{layer}."
        probability = sigmoid(w[p + "ffn_gate_inp.weight"] @ x)
        ranked = probability + w[p + "exp_probs_b.bias"]
        groups = self.key("expert_group_count", 0)
        if groups > 1:
            by_group = ranked.reshape(groups, -1)
            best = np.sort(by_group, axis=1)[:, -2:].sum(1)
            dropped = np.argsort(-best)[self.keys["expert_group_used_count"] :]
            by_group[dropped] = -np.inf
            ranked = by_group.ravel()
        ids = np.argsort(-ranked)[: self.keys["expert_used_count"]]
        chosen = probability[ids]
        if self.arch == "kimi-linear" or self.key("expert_weights_norm", False):
            chosen = chosen / max(chosen.sum(), 2.0**-14)
        chosen = chosen * (self.key("expert_weights_scale", 0.0) or 1.0)
        self.chosen.setdefault(layer, []).append(dict(zip(ids.tolist(), chosen, strict=True)))
        t = w[p + "ffn_routed_down.weight"] @ x if p + "ffn_routed_down.weight" in w else x
        y = np.zeros_like(t)
        for e, weight in zip(ids, chosen, strict=True):
            gate, up, down = (w[f"{p}ffn_{r}_exps.weight"][e] for r in ("gate", "up", "down"))
            y = y + weight * (down @ self.act(gate @ t, up @ t))
        if p + "ffn_routed_norm.weight" in w:
            y = self.rms(y, w[p + "ffn_routed_norm.weight"])
        if p + "ffn_routed_up.weight" in w:
            y = w[p + "ffn_routed_up.weight"] @ y
        return y + self.mlp(p, "_shexp", x) if p + "ffn_gate_shexp.weight" in w else y

    def delta_attention(self, p: str, x: np.ndarray) -> np.ndarray:
        w, heads, d = self.weights, self.keys["attention.head_count"], self.keys["kda.head_dim"]
        n, taps = len(x), self.keys["ssm.conv_kernel"]
        if p + "attn_qkv.weight" in w:
            projections = np.split(w[p + "attn_qkv.weight"], 3)
        else:
            projections = [w[f"{p}attn_{r}.weight"] for r in "qkv"]
        parts = []
        for role, matrix in zip("qkv", projections, strict=True):
            raw = np.concatenate([np.zeros((taps - 1, heads * d)), x @ matrix.T])
            kernel = w[f"{p}ssm_conv1d_{role}.weight"].reshape(heads * d, taps)
            y = np.stack([(raw[t : t + taps] * kernel.T).sum(0) for t in range(n)])
            parts.append((y * sigmoid(y)).reshape(n, heads, d))
        q, k, v = parts
        q, k = (u / np.sqrt((u * u).sum(-1, keepdims=True) + self.eps) for u in (q, k))
        f = x @ w[p + "ssm_f_a.weight"].T @ w[p + "ssm_f_b.weight"].T + w[p + "ssm_dt.bias"]
        f, a = f.reshape(n, heads, d), -w[p + "ssm_a"].reshape(heads, 1)
        bound = self.key("kda.gate_lower_bound")
        g = -a * np.log1p(np.exp(f)) if bound is None else bound * sigmoid(a * f)
        beta = sigmoid(x @ w[p + "ssm_beta.weight"].T)
        if p + "ssm_g.weight" in w:
            gate = x @ w[p + "ssm_g.weight"].T
        else:
            gate = x @ w[p + "ssm_g_a.weight"].T @ w[p + "ssm_g_b.weight"].T
        memory, out = np.zeros((heads, d, d)), np.zeros((n, heads, d))
        for t in range(n):
            for h in range(heads):
                s = np.exp(g[t, h])[:, None] * memory[h]
                s = s + np.outer(k[t, h], beta[t, h] * (v[t, h] - s.T @ k[t, h]))
                memory[h], out[t, h] = s, s.T @ q[t, h] / np.sqrt(d)
        out = self.rms(out, w[p + "ssm_norm.weight"]) * sigmoid(gate.reshape(n, heads, d))
        return out.reshape(n, -1) @ w[p + "attn_output.weight"].T

    def latent_attention(self, p: str, x: np.ndarray) -> np.ndarray:
        """Keys and values of every head written out, not absorbed."""
        w, heads, n = self.weights, self.keys["attention.head_count"], len(x)
        key, value = self.keys["attention.key_length_mla"], self.keys["attention.value_length_mla"]
        rank, pe = self.keys["attention.kv_lora_rank"], self.keys["rope.dimension_count"]
        nope = key - pe
        if p + "attn_q_a.weight" in w:
            q = self.rms(x @ w[p + "attn_q_a.weight"].T, w[p + "attn_q_a_norm.weight"])
            q = q @ w[p + "attn_q_b.weight"].T
        else:
            q = x @ w[p + "attn_q.weight"].T
        q = q.reshape(n, heads, key)
        z = x @ w[p + "attn_kv_a_mqa.weight"].T
        latent = self.rms(z[:, :rank], w[p + "attn_kv_a_norm.weight"])
        if p + "attn_kv_b.weight" in w:
            both = (latent @ w[p + "attn_kv_b.weight"].T).reshape(n, heads, nope + value)
            keys, values = both[..., :nope], both[..., nope:]
        else:
            keys = np.einsum("hcn,tc->thn", w[p + "attn_k_b.weight"], latent)
            values = np.einsum("hvc,tc->thv", w[p + "attn_v_b.weight"], latent)
        shared = np.broadcast_to(z[:, None, rank:], (n, heads, pe))
        keys = np.concatenate([keys, shared], axis=2)
        out = np.zeros((n, heads, value))
        for t in range(n):
            for h in range(heads):
                s = keys[: t + 1, h] @ q[t, h] / np.sqrt(key)
                s = np.exp(s - s.max())
                out[t, h] = s / s.sum() @ values[: t + 1, h]
        out = out.reshape(n, -1)
        if p + "attn_gate.weight" in w:
            out = out * sigmoid(x @ w[p + "attn_gate.weight"].T)
        return out @ w[p + "attn_output.weight"].T
