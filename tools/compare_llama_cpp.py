"""Compare the logits of a GGUF with llama.cpp's, through a twin in float32.

    pip install llama-cpp-python          # compiles llama.cpp
    python tools/compare_llama_cpp.py model.gguf --tokens 400
    python tools/compare_llama_cpp.py model.gguf --token-ids ids.json --kernels reference
    python tools/compare_llama_cpp.py --variants          # every tiny model of tiny_variants.py
    python tools/compare_llama_cpp.py --variants k-quants clamp-small --decode 20
    python tools/compare_llama_cpp.py --variants k-quants --freeze tests/data/llama_cpp

The twin holds the same weights as F32, so llama.cpp rounds no activation and evaluates what our
float32 path does; its key/value cache is F32 and flash attention is off. The twin is as large as
all weights in float32: this is for small models. Two implementations that agree differ by about
1e-5; an expert or indexer choice that flips at a near-tie makes single positions differ by more.
`--freeze` writes llama.cpp's logits at a few positions, for tests that run without it.

Exit code 1 where a model does not meet the tolerance: at least 99 % of positions within 1e-3, and
a median over positions of at most 1e-4 (of each position's largest difference).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from make_tiny_gguf import TinyConfig, write_tiny_deepseek4
from tiny_variants import VARIANTS

import aprefetch
from aprefetch.storage import open_source

__all__ = [
    "Difference", "compare", "float32_twin", "llama_logits", "our_logits", "random_ids",
    "weights_digest",
]  # fmt: skip

_OWN_KEYS = ("GGUF.", "split.", "general.alignment", "general.architecture", "general.file_type")
_NOT_WEIGHTS = (GGMLQuantizationType.I8, GGMLQuantizationType.I16, GGMLQuantizationType.I32)


@dataclass(frozen=True)
class Difference:
    """Absolute differences of two runs' logits; `worst` is per position the largest."""

    worst: np.ndarray

    @property
    def largest(self) -> float:
        """Over all positions."""
        return float(self.worst.max())

    @property
    def median(self) -> float:
        """Over positions."""
        return float(np.median(self.worst))

    @property
    def n_beyond(self) -> int:
        """Positions that differ by more than 1e-3 somewhere."""
        return int((self.worst > 1e-3).sum())

    @property
    def is_within_tolerance(self) -> bool:
        """What float32 arithmetic must meet."""
        return self.n_beyond <= 0.01 * len(self.worst) and self.median <= 1e-4


def compare(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    """Logits `[N, V]` of both."""
    return Difference(np.abs(ours - theirs).max(axis=1))


def random_ids(n_vocab: int, n: int, seed: int = 0) -> list[int]:
    """Token ids to evaluate; hash-routed layers see most of the vocabulary."""
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def float32_twin(files: Sequence[Path], path: Path, drop: Sequence[str] = ()) -> None:
    """Write all weights of a model as F32 into one file; integers stay, `drop` tensors go.

    Args:
        files: the model's shards in order; the first holds the metadata.
        path: where to.
        drop: endings of tensor names that llama.cpp does not know.
    """
    readers = [gguf.GGUFReader(file) for file in files]
    architecture = readers[0].fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in readers[0].fields.values():
        if field.name.startswith(_OWN_KEYS):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for reader in readers:
        for tensor in reader.tensors:
            if tensor.name.endswith(tuple(drop)):
                continue
            values = tensor.data
            if tensor.tensor_type not in _NOT_WEIGHTS:
                values = gguf.quants.dequantize(values, tensor.tensor_type)
                values = np.ascontiguousarray(values, np.float32)
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights_digest(files: Sequence[Path]) -> str:
    """SHA-256 over all tensors' names and bytes: whether a rebuilt file is the frozen one."""
    digest = hashlib.sha256()
    for file in files:
        for tensor in gguf.GGUFReader(file).tensors:
            digest.update(tensor.name.encode())
            digest.update(np.ascontiguousarray(tensor.data).view(np.uint8))
    return digest.hexdigest()


def _freeze(
    path: Path, files: Sequence[Path], ids: Sequence[int], logits: np.ndarray, greedy: list[int]
) -> None:
    """Keep logits `[8, V]` at positions spread over the prompt, the last one among them."""
    positions = np.linspace(0, len(ids) - 1, 8).round().astype(np.int32)
    np.savez_compressed(
        path,
        ids=np.asarray(ids, np.int32),
        positions=positions,
        logits=logits[positions].astype(np.float32),
        greedy=np.asarray(greedy, np.int32),
        digest=np.asarray(weights_digest(files)),
    )


def _yarn_options(path: Path) -> dict[str, float]:
    """What the file says of YaRN's ramp: llama.cpp does not read these keys for `deepseek4`."""
    fields = gguf.GGUFReader(path).fields
    prefix = f"{fields['general.architecture'].contents()}.rope.scaling."
    names = ("yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor")
    return {name: fields[prefix + name].contents() for name in names if prefix + name in fields}


def _llama_logits(
    path: Path, ids: Sequence[int], n_decode: int, verbose: bool
) -> tuple[np.ndarray, list[int]]:
    from llama_cpp import Llama

    n_context = -(-(len(ids) + n_decode + 1) // 256) * 256
    llama = Llama(
        str(path), n_ctx=n_context, n_batch=n_context, n_ubatch=512, n_threads=2,
        n_threads_batch=2, flash_attn=False, type_k=0, type_v=0, logits_all=True, verbose=verbose,
        **_yarn_options(path),
    )  # fmt: skip
    try:
        llama.eval(ids)
        logits = llama.scores[: len(ids)].copy()
        last, greedy = logits[-1], []
        for _ in range(n_decode):
            greedy.append(int(last.argmax()))
            llama.eval(greedy[-1:])
            last = llama.scores[llama.n_tokens - 1]
        return logits, greedy
    finally:
        llama.close()


def llama_logits(
    path: Path, ids: Sequence[int], n_decode: int = 0, *, verbose: bool = False
) -> tuple[np.ndarray, list[int]]:
    """Logits `[N, V]` of the prompt, and so many greedy tokens after it.

    In a process of its own, since llama.cpp ends the process on a model that it cannot run.

    Raises:
        RuntimeError: it did so.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_llama_logits, path, ids, n_decode, verbose).result()
        except BrokenProcessPool:
            raise RuntimeError("llama.cpp crashed on this model") from None


async def our_logits(
    path: Path, ids: Sequence[int], n_decode: int = 0, **options: Any
) -> tuple[np.ndarray, list[int]]:
    """The same by `Runtime.score` and `Runtime.generate`."""
    async with aprefetch.Runtime.open(path, **options) as runtime:
        scored = await runtime.score(list(ids), logits=True)
        greedy: list[int] = []
        if n_decode:
            answer = await runtime.generate(
                list(ids), max_tokens=n_decode, temperature=0, ignore_eos=True
            )
            greedy = list(answer.token_ids)
    assert scored.logits is not None
    return np.asarray(scored.logits), greedy


def _shards(path: Path) -> list[Path]:
    with open_source(path) as source:
        return list(source.paths)


def _check(name: str, files: list[Path], args: argparse.Namespace) -> bool:
    """Compare one model and print a line."""
    ids = args.ids
    if ids is None:
        with open_source(files[0]) as source:
            n_vocab = source.tensors["token_embd.weight"].shape[0]
        ids = random_ids(n_vocab, args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "twin.gguf"
        float32_twin(files, twin, args.drop)
        try:
            theirs, their_greedy = llama_logits(twin, ids, args.decode, verbose=args.verbose)
        except (RuntimeError, ValueError) as error:
            print(f"{name:28s} {error}", flush=True)
            return False
    if args.freeze:
        _freeze(args.freeze / f"{name}.npz", files, ids, theirs, their_greedy)
    options = {"kernels": args.kernels} if args.kernels else {}
    ours, our_greedy = asyncio.run(our_logits(files[0], ids, args.decode, **options))
    found = compare(ours, theirs)
    same = next((i for i, id_ in enumerate(our_greedy) if id_ != their_greedy[i]), args.decode)
    verdict = "ok" if found.is_within_tolerance else "BEYOND TOLERANCE"
    print(
        f"{name:28s} {len(ids):5d} {theirs.std():6.2f}  {found.largest:9.2e} {found.median:9.2e} "
        f"{found.n_beyond:6d}  {same:3d}/{args.decode:<3d}  {verdict}",
        flush=True,
    )
    return found.is_within_tolerance


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="Compare a GGUF's logits with llama.cpp's.")
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF, or any one shard")
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="tiny models; none: all")
    parser.add_argument("--tokens", type=int, default=400, help="random prompt tokens (400)")
    parser.add_argument("--token-ids", type=Path, metavar="FILE", help="JSON list of ids instead")
    parser.add_argument("--decode", type=int, default=20, metavar="N", help="greedy tokens (20)")
    parser.add_argument("--kernels", choices=("auto", "fast", "reference"))
    parser.add_argument(
        "--drop", action="append", default=["exp_probs_b_vl.bias"], metavar="ENDING",
        help="tensors that llama.cpp does not know",
    )  # fmt: skip
    parser.add_argument(
        "--freeze", type=Path, metavar="FOLDER", help="keep llama.cpp's results there"
    )
    parser.add_argument("--verbose", action="store_true", help="show llama.cpp's log")
    args = parser.parse_args()
    if (args.model is None) == (args.variants is None):
        parser.error("give a model, or --variants")
    args.ids = json.loads(args.token_ids.read_text()) if args.token_ids else None
    titles = f"{'tokens':>5s} {'std':>5s}  {'largest':>9s} {'median':>9s} {'> 1e-3':>6s}  greedy"
    print(f"{'model':28s}{titles}")
    good = True
    if args.model is not None:
        good = _check(args.model.name, _shards(args.model), args)
    for name in args.variants or (VARIANTS if args.variants is not None else ()):
        config: TinyConfig = VARIANTS[name]
        with tempfile.TemporaryDirectory() as folder:
            files = write_tiny_deepseek4(Path(folder) / "tiny.gguf", config)
            good = _check(name, files, args) and good
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
