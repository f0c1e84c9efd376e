"""What `DGMOE_SANITY_CHECK=1` looks at before a library's GEMM, so that it waits for the device.

The op itself has looked whether masked_m and m_indices are in range.
"""

from __future__ import annotations

import torch

from .._sanity import at, first_where
from ..formats.layout import Layout
from ..formats.layouts import TILE_ROWS, round_up
from .request import Request, refuse


def check_request(request: Request, exponents: bool, alignment: int) -> None:
    """Check what a request's tensors hold.

    Raises:
        ValueError: m_indices changes inside an aligned block of rows, or, where `exponents` (the
            tensor core takes them), a scale that is read is no positive power of two. The first
            offending element is named.
    """
    if request.spec.layout is Layout.CONTIG:
        _check_m_indices(request, alignment)
    if exponents and request.operands.a_scale is not None:
        for arg in ("a_scale", "b_scale"):
            _check_exponents(request, arg, getattr(request.operands, arg))


def _check_m_indices(request: Request, alignment: int) -> None:
    indices = request.operands.info
    # The library reads the expert of a block from one row of it.
    blocks = indices.view(-1, alignment)
    first = blocks[:, :1]
    where = first_where((blocks != first) & (blocks != -1))
    if where is not None:
        row = where[0] * alignment + where[1]
        must = f"hold one expert in each aligned block of {alignment} rows, in front of its padding"
        got = f"{int(indices[row])} at [{row}] after {int(first[where[0], 0])}"
        raise refuse(request.op, "m_indices", must, got)


def _check_exponents(request: Request, arg: str, scale: torch.Tensor) -> None:
    """Bytes 1 to 254 are positive powers of two; 255 is NaN and 0 only pads."""
    bytes_ = torch.stack([scale >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    read = torch.ones(bytes_.shape[:-1], dtype=torch.bool, device=scale.device)
    if arg == "a_scale" and request.spec.masked:
        # Rows past an expert's last tile are never written and never read.
        rows = torch.arange(request.spec.m, device=scale.device)
        tiles = [round_up(int(count), TILE_ROWS) for count in request.operands.info]
        read = rows < torch.tensor(tiles, device=scale.device).unsqueeze(-1)
    spec = request.spec
    granularity = spec.granularity_a if arg == "a_scale" else spec.granularity_b
    groups = -(-spec.k // (granularity[1] if granularity else 128))
    bad = ((bytes_ == 0) | (bytes_ == 255)) & read.unsqueeze(-1)
    where = first_where(bad[..., :groups])
    if where is not None:
        got = f"exponent byte {int(bytes_[where])} at {at(where)}"
        raise refuse(request.op, arg, "hold positive powers of two in every row that is read", got)
