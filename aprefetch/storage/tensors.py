"""The tensor table: where each tensor's bytes lie, kept as arrays.

A file may list 250,000 tensors, so a row of the table is a few integers in numpy columns and a
dictionary entry; a `TensorInfo` is built when somebody asks for one. The table is immutable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprefetch.errors import SourceError

__all__ = ["TensorInfo", "TensorTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a source.

    `shape` is in torch order (slowest dimension first), `file` indexes `ModelSource.paths`, and
    `offset` is the absolute byte offset in that file.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    n_bytes: int
    file: int
    offset: int


class TensorTable(Mapping[str, TensorInfo]):
    """Tensors by name, in file order.

    Args:
        rows: name -> row number, in row order.
        ggml_type, n_dims, n_bytes, file, offset: int64 columns `[n]`.
        dims: int64 `[n, 4]`, ggml order (fastest first), 1 beyond `n_dims`.
    """

    __slots__ = ("_dims", "_file", "_ggml_type", "_n_bytes", "_n_dims", "_offset", "_rows")

    def __init__(
        self,
        rows: dict[str, int],
        *,
        ggml_type: NDArray[np.int64],
        n_dims: NDArray[np.int64],
        dims: NDArray[np.int64],
        n_bytes: NDArray[np.int64],
        file: NDArray[np.int64],
        offset: NDArray[np.int64],
    ) -> None:
        self._rows = rows
        self._ggml_type = ggml_type
        self._n_dims = n_dims
        self._dims = dims
        self._n_bytes = n_bytes
        self._file = file
        self._offset = offset

    def __getitem__(self, name: str) -> TensorInfo:
        row = self._rows[name]
        n_dims = int(self._n_dims[row])
        return TensorInfo(
            name=name,
            ggml_type=int(self._ggml_type[row]),
            shape=tuple(self._dims[row, :n_dims].tolist()[::-1]),
            n_bytes=int(self._n_bytes[row]),
            file=int(self._file[row]),
            offset=int(self._offset[row]),
        )

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all tensors."""
        return int(self._n_bytes.sum())

    @classmethod
    def concat(cls, tables: Sequence[TensorTable]) -> TensorTable:
        """One table over the files of a set, in order; `file` is renumbered 0, 1, ...

        Raises:
            SourceError: two files hold a tensor of the same name.
        """
        if len(tables) == 1:
            return tables[0]
        rows: dict[str, int] = {}
        for number, table in enumerate(tables):
            start = len(rows)
            for name, row in table._rows.items():
                if name in rows:
                    raise SourceError(
                        f"tensor {name!r} of shard {number + 1} is also in an earlier shard; "
                        "the shards are not from one set, fetch all of them again",
                        key=name,
                    )
                rows[name] = start + row
        return cls(
            rows,
            ggml_type=np.concatenate([t._ggml_type for t in tables]),
            n_dims=np.concatenate([t._n_dims for t in tables]),
            dims=np.concatenate([t._dims for t in tables]),
            n_bytes=np.concatenate([t._n_bytes for t in tables]),
            file=np.repeat(np.arange(len(tables)), [len(t) for t in tables]).astype(np.int64),
            offset=np.concatenate([t._offset for t in tables]),
        )
