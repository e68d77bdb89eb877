"""The blocking part of an opening: vocabulary, chat template, dense weights, kept states."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aprefetch._version import __version__
from aprefetch.config import RuntimeConfig
from aprefetch.engine.prefix_cache import PrefixCache
from aprefetch.errors import ConfigError
from aprefetch.models.base import Model, ModelInfo
from aprefetch.pipeline.coordinator import Coordinator
from aprefetch.pipeline.correction import load_corrections, path_beside
from aprefetch.pipeline.hotlist import load_hot_list, save_hot_list
from aprefetch.pipeline.lookahead import Lookahead, RoutedLayer
from aprefetch.plan import Examined
from aprefetch.stats import Counters
from aprefetch.storage.state_files import StateFiles
from aprefetch.text.chat_template import ChatTemplate, load_chat_template
from aprefetch.text.tokenizer import Tokenizer
from aprefetch.text.vocab import load_tokenizer
from aprefetch.types import ExpertKey

__all__ = [
    "Loaded",
    "in_thread",
    "load",
    "make_lookahead",
    "open_prefix",
    "routing_facts",
    "state_budget_bytes",
    "warm_from_list",
]

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What an open runtime keeps in memory besides experts."""

    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate


def load(examined: Examined, tokenizer_path: str | os.PathLike[str] | None = None) -> Loaded:
    """The vocabulary first, since it fails early, then the dense weights. Blocks.

    Raises:
        ModelError: a vocabulary or tensors that cannot be used.
        ReadError: the drive failed.
    """
    source = examined.source
    tokenizer = load_tokenizer(source, None if tokenizer_path is None else Path(tokenizer_path))
    template = load_chat_template(source.metadata, examined.entry.name, tokenizer)
    model = examined.entry.load(
        source,
        examined.experts.layers,
        examined.experts.tensor_names,
        examined.device.ops,
        torch.device(examined.device.name),
    )
    return Loaded(model, tokenizer, template)


def state_budget_bytes(examined: Examined, info: ModelInfo) -> int:
    """For the caches of running requests: as chosen, else a quarter of what is free.

    Room for one request of some length there is in any case.
    """
    chosen = examined.config.batch.state_bytes
    if chosen is not None:
        return chosen
    chunk_bytes = info.state_bytes_per_chunk_token * examined.config.chunk_tokens
    one_bytes = info.state_bytes_fixed + 2 * info.state_bytes_per_token * 4096 + chunk_bytes
    return max(int(examined.device.memory_info().free_bytes) // 4, one_bytes)


def make_lookahead(
    examined: Examined, config: RuntimeConfig, model: Model, device_name: str, counters: Counters
) -> Lookahead | None:
    """The lookahead as configured, with the corrections that lie beside the model. Blocks."""
    if not config.lookahead.is_on:
        return None
    info = model.info
    layers = {
        layer: RoutedLayer(
            info.n_experts,
            info.num_experts_per_tok,
            examined.experts.layers[layer].payload_bytes,
        )
        for layer in info.routed_layers
    }
    chosen = config.lookahead
    if config.trace.settled and chosen.width is None:  # a measured pace never repeats
        chosen = replace(chosen, width=info.num_experts_per_tok)
    corrections = load_corrections(path_beside(examined.plan.path), device_name)
    return Lookahead(model.early_routers, layers, chosen, counters, corrections=corrections)


def open_prefix(examined: Examined) -> PrefixCache | None:
    """Where states of sequences are kept, if they are. Blocks.

    Raises:
        ConfigError: the folder cannot be used.
    """
    options, device = examined.config.prefix, examined.device
    if not options.budget_bytes:
        return None
    files: StateFiles | None = None
    if options.folder is not None:
        # All that a state's bits depend on.
        model = examined.source.identity().digest
        parts = model, device.name, device.ops.name, torch.__version__, __version__
        identity = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
        try:
            files = StateFiles(Path(options.folder), identity, options.disk_budget_bytes)
        except OSError as error:
            raise ConfigError(f"prefix_folder {options.folder}: {error}") from error
    return PrefixCache(options.budget_bytes, files)


async def warm_from_list(
    coordinator: Coordinator, examined: Examined, stack: AsyncExitStack
) -> None:
    """Load what an earlier run found worth its room, and have the list written at the close."""
    chosen = examined.config.memory.hot_list
    if chosen is None:
        return
    path = Path(chosen)
    model = await asyncio.to_thread(lambda: examined.source.identity().digest)

    async def save() -> None:
        keys = coordinator.hottest()
        try:
            await asyncio.to_thread(save_hot_list, path, model, keys)
        except OSError as error:
            log.warning("hot list %s was not written: %s", path, error)

    stack.push_async_callback(save)
    await coordinator.warm(await asyncio.to_thread(load_hot_list, path, model))


def routing_facts(examined: Examined, info: ModelInfo) -> dict[str, Any]:
    """What a replay of the run must know of it."""
    config = examined.config
    return {
        "model": info.name,
        "architecture": info.architecture,
        "n_layers": info.n_layers,
        "n_experts": info.n_experts,
        "num_experts_per_tok": info.num_experts_per_tok,
        "token_routed_layers": list(info.token_routed_layers),
        "dense_bytes": info.dense_bytes,
        "object_bytes": {
            str(layer): layout.payload_bytes for layer, layout in examined.experts.layers.items()
        },
        "role_bytes": {
            str(layer): [role.n_bytes for role in layout.roles]
            for layer, layout in examined.experts.layers.items()
        },
        "landing_bytes": {
            str(layer): examined.experts.max_landing_bytes(layer)
            for layer in examined.experts.layers
        },
        "reads_per_object": len(
            examined.experts.read_plan(ExpertKey(min(examined.experts.layers), 0)).reads
        ),
        "alignment": examined.experts.alignment,
        "vram_budget_bytes": examined.plan.vram_budget_bytes,
        "ram_budget_bytes": examined.plan.ram_budget_bytes,
        "cache_policy": config.cache_policy,
        "queue_depth": config.reader.queue_depth,
        "lookahead_depth": config.lookahead.depth if config.lookahead.is_on else 0,
        "settled": config.trace.settled,
    }


async def in_thread(fn: Callable[[], Any], cancel: threading.Event | None = None) -> Any:
    """Run `fn` on a thread; when cancelled, wait for it all the same and give up its result.

    `cancel` is set then, so that `fn` can end early.
    """
    task = asyncio.ensure_future(asyncio.to_thread(fn))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if cancel is not None:
            cancel.set()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            result = task.result()
            if isinstance(result, Examined):
                result.source.close()
                result.device.close()
        raise
