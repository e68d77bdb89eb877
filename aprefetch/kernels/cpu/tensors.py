"""Tensors as compiled kernels want them, at the least cost per call."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["flat", "ids", "new", "wrong"]

_f32 = torch.float32
_empty_like = torch.empty_like
_templates: dict[tuple[int, ...], Tensor] = {}
_MAX_TEMPLATES = 4096


def flat(x: Tensor) -> Tensor:
    """`x` as kernels want it: contiguous float32. Costs nothing when it is so already."""
    if x.dtype is not _f32 or not x.is_contiguous():
        return x.to(_f32).contiguous()
    return x


def ids(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for whole numbers."""
    if x.dtype is not dtype or not x.is_contiguous():
        return x.to(dtype).contiguous()
    return x


def new(*shape: int) -> Tensor:
    """An uninitialised float32 tensor; `empty_like` costs half of `empty` with a type."""
    template = _templates.get(shape)
    if template is None:
        if len(_templates) >= _MAX_TEMPLATES:
            _templates.clear()
        # One number seen in all places: it has the shape and no memory to speak of.
        template = torch.empty((), dtype=_f32, device="cpu").expand(shape)
        _templates[shape] = template
    return _empty_like(template)


def wrong(name: str, got: object, wanted: object) -> ValueError:
    return ValueError(f"{name}: got {got}, expected {wanted}")
