"""What the sanity mode shares: the first element that is wrong, named."""

from __future__ import annotations

import torch


def looks_at(tensor: torch.Tensor) -> bool:
    """Whether the contents of a tensor can be looked at now: not while tracing or capturing."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def first_where(mask: torch.Tensor) -> tuple[int, ...] | None:
    """The indices of the first true element, or None."""
    found = mask.nonzero()  # in the order of the elements
    return tuple(found[0].tolist()) if found.shape[0] else None


def at(indices: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, indices))}]"
