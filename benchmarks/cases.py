"""What a room's benchmark file hands to the CLI: a builder an op, making a call and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.inputs import LayerInputs, layer_inputs
from benchmarks.shapes import Shape
from dgmoe_ops.formats.layouts import TILE_ROWS, slab_rows

MEMORY_LIMIT = 50e9  #: bytes of one slab above which a case is left out


class TooLarge(Exception):
    """The case does not fit `MEMORY_LIMIT`."""


@dataclass(frozen=True)
class Case:
    """One call on inputs of its own.

    Attributes:
        call: runs the op once and returns what it returns.
        bytes: the fewest bytes that it must move: each input element it needs read once, each
        promised output written
            once. Padding counts only where the op promises to write it.
        flops: multiply-adds times two; 0 where the op moves data.
    """

    call: Callable[[], object]
    bytes: int
    flops: int = 0


Builder = Callable[[Shape, int, torch.device, int], Case]


def nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def groups(columns: int, group_size: int = 128) -> int:
    return -(-columns // group_size)


@dataclass(frozen=True)
class Routed:
    """A routing, and the row counts that the two layouts make of it."""

    inputs: LayerInputs
    rows: int  # routed rows
    used: int  # experts with a row
    counts: torch.Tensor  # (experts,) int32
    slab: int  # rows an expert in the masked layout

    @property
    def tile_rows(self) -> int:
        """Rows whose scales must be legal: those of every tile that holds a routed row."""
        tiles = (self.counts + TILE_ROWS - 1) // TILE_ROWS
        return int(tiles.sum()) * TILE_ROWS


def routed(shape: Shape, tokens: int, device: torch.device, seed: int) -> Routed:
    """Draw inputs and count what they need."""
    inputs = layer_inputs(shape, tokens, device, seed)
    counts = torch.bincount(inputs.topk_ids.flatten().long(), minlength=shape.experts).int()
    used = int((counts > 0).sum())
    return Routed(inputs, tokens * shape.top_k, used, counts, slab_rows(tokens))


def check_slab(shape: Shape, rows: int, row_bytes: int) -> None:
    """Raise TooLarge where a masked slab would take more than `MEMORY_LIMIT`."""
    if shape.experts * rows * row_bytes > MEMORY_LIMIT:
        raise TooLarge


def random_slab(shape: Shape, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Draw a bf16 masked slab; raises TooLarge."""
    check_slab(shape, rows, 2 * columns)
    return torch.randn(shape.experts, rows, columns, device=device, dtype=torch.bfloat16)
