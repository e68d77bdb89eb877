"""Runs a model with all of its experts copied into one arena: the math without the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aprefetch.kernels.ops import Ops
from aprefetch.models import registry
from aprefetch.models.base import Chunk, Model
from aprefetch.models.moe import RoutedCall
from aprefetch.storage import GgufExperts, open_source
from aprefetch.types import ExpertKey, align_up


@dataclass
class Slot:
    expert: int
    offset: int


class Resident:
    """A model whose experts all lie in `arena`."""

    def __init__(self, path: str | Path, ops: Ops, device: str = "cpu") -> None:
        self.source = open_source(path)
        entry = registry.lookup(self.source.metadata)
        n_layers = entry.n_layers(self.source.metadata, self.source.tensors)
        self.experts = GgufExperts(self.source, layers=range(n_layers))
        self.ops = ops
        self.model: Model = entry.load(
            self.source,
            self.experts.layers,
            frozenset(self.experts.tensor_names),
            ops,
            torch.device(device),
        )
        self.offsets: dict[ExpertKey, int] = {}
        blocks, at = [], 0
        for layer, layout in self.experts.layers.items():
            for expert in range(layout.n_experts):
                self.offsets[ExpertKey(layer, expert)] = at
                blocks.append(self._object(ExpertKey(layer, expert), layout.device_bytes))
                at += layout.device_bytes
        self.arena = torch.from_numpy(np.concatenate(blocks)).to(device)

    def _object(self, key: ExpertKey, n_bytes: int) -> np.ndarray:
        plan = self.experts.read_plan(key)
        landing = np.zeros(align_up(plan.landing_bytes), np.uint8)
        for read in plan.reads:
            with open(self.experts.paths[read.file], "rb") as file:
                file.seek(read.offset)
                got = np.frombuffer(file.read(read.length), np.uint8)
            landing[read.landing_offset : read.landing_offset + len(got)] = got
        slot = np.zeros(n_bytes, np.uint8)
        for piece in plan.pieces:
            slot[piece.device_offset : piece.device_offset + piece.n_bytes] = landing[
                piece.landing_offset : piece.landing_offset + piece.n_bytes
            ]
        return slot

    def leases(self, call: RoutedCall) -> list[Slot]:
        return [Slot(e, self.offsets[ExpertKey(call.layer, e)]) for e in call.experts]

    def step(self, chunks: Sequence[Chunk], seen: dict[int, np.ndarray] | None = None):
        forward = self.model.forward(chunks)
        while True:
            try:
                call = next(forward)
            except StopIteration as stop:
                return stop.value
            if call.finishing:
                if seen is not None:
                    seen[call.layer] = call.ids
                call.run(self.arena, self.leases(call))

    def logits(self, ids: Sequence[int], chunk: int = 0, seen=None) -> Tensor:
        """Logits at every position."""
        state, out = self.model.new_state(), []
        ids = np.asarray(ids, np.int64)
        for i in range(0, len(ids), chunk or len(ids)):
            part = ids[i : i + (chunk or len(ids))]
            out.append(self.step([Chunk(state, part, "all")], seen)[0])
        return torch.cat(out)

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """The `n` likeliest tokens after a prompt."""
        state, token_ids, out = self.model.new_state(), list(ids), []
        for _ in range(n):
            logits = self.step([Chunk(state, np.array(token_ids))])[0]
            token_ids = [int(logits[-1].argmax())]
            out += token_ids
        return out

    def logits_one_by_one(self, ids: Sequence[int]) -> Tensor:
        """Logits at every position, by experts that run each alone, the last first."""
        forward = self.model.forward([Chunk(self.model.new_state(), np.array(ids), "all")])
        while True:
            try:
                call = next(forward)
            except StopIteration as stop:
                return stop.value[0]
            if call.finishing:
                for lease in reversed(self.leases(call)):
                    call.run(self.arena, [lease])
