"""What the sample generators share: Sample, tensors with odd strides, routings, hard values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Device = str | torch.device
Call = tuple[tuple, dict]
STRIDES = ("dense", "transposed", "sliced", "stepped")


@dataclass(frozen=True)
class Sample:
    """Arguments for one op: `build(device, seed=..., **case)` makes (args, kwargs) of a case."""

    build: Callable[..., Call]
    tiny_case: dict
    edge_cases: Sequence[dict]
    space: dict[str, Sequence]

    def tiny(self, device: Device = "cpu") -> Call:
        """Return one small ordinary call."""
        return self.build(device, seed=0, **self.tiny_case)

    def edge(self, device: Device = "cpu") -> list[Call]:
        """Return the hard calls: empty, odd, strided, poisoned, extreme."""
        return [self.build(device, seed=seed, **case) for seed, case in enumerate(self.edge_cases)]

    def random(self, draw: Callable, device: Device = "cpu") -> Call:
        """Return a call that hypothesis draws."""
        return self.draw(draw, device, self.space)

    def draw(self, draw: Callable, device: Device, space: dict[str, Sequence]) -> Call:
        from hypothesis import strategies as st

        case = {name: draw(st.sampled_from(list(choice))) for name, choice in space.items()}
        return self.build(device, seed=draw(st.integers(0, 2**16)), **case)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_strides(tensor: torch.Tensor, strides: str) -> torch.Tensor:
    """Return a view of equal values whose last two dimensions stand otherwise in memory.

    "sliced" rows start off 16 bytes; "stepped" rows skip every second element. The gaps hold bytes
    0x7f.
    """
    if strides == "dense":
        return tensor
    if strides == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if strides == "tma":  # columns start on 16 bytes
        *batch, rows, columns = tensor.shape
        room = tensor.new_zeros((*batch, columns, -(-rows // 4) * 4))
        view = room[..., :rows].transpose(-1, -2)
        view.copy_(tensor)
        return view
    *outer, columns = tensor.shape
    sliced = strides == "sliced"
    wide = tensor.new_empty((*outer, columns + 3 if sliced else 2 * columns))
    wide.view(torch.uint8).fill_(0x7F)
    view = wide[..., 1 : columns + 1] if sliced else wide[..., ::2]
    view.copy_(tensor)
    return view


def normal(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Return fp32 normal values whose rows differ in size by powers of two."""
    x = torch.randn(shape, generator=rng)
    return x * torch.exp2(torch.randint(-8, 9, (*shape[:-1], 1), generator=rng).float())


#: where rounding, clamping or scaling decides: 1.75 * 2^j keeps the smaller power-of-two scale
HARD = (0.0, -0.0, 1e-30, 1.75, -1.7578125, 448.0, 450.0, 3.38e38, 1e-38, -(2.0**-126), 0.5, 1e-4)
BROKEN = (float("inf"), float("-inf"), float("nan"))


def hard_rows(x: torch.Tensor) -> torch.Tensor:
    """Put hard values into rows, in place; of four rows one holds an inf or a NaN, one is zero."""
    flat = x.view(-1, x.shape[-1]) if x.numel() else x
    for row in range(flat.shape[0] if x.numel() else 0):
        values = BROKEN if row % 4 == 3 else HARD
        value = values[row // 4 % len(values)] if row % 4 == 3 else values[row % len(values)]
        if row % 4 == 2:
            flat[row] = 0.0
        elif row % 4 == 0:
            flat[row] = torch.sign(flat[row]) * abs(value)
        flat[row, row * 5 % flat.shape[1]] = value
    return x


def routing(
    kind: str, tokens: int, top_k: int, experts: int, start: int, rng: torch.Generator
) -> torch.Tensor:
    """Return ids (tokens, top_k) int64, local, foreign and negative; one expert gets no tokens.

    Kinds: "mixed" (with duplicates), "distinct", "none" (nothing is local), "one" (always the same
    expert), "huge" (ids that int32 cannot hold).
    """
    shape = (tokens, top_k)
    end = start + experts
    if kind == "none":
        return torch.where(torch.arange(top_k) % 2 == 0, -1, end).expand(shape).contiguous()
    if kind == "one":
        return torch.full(shape, start + max(experts - 1, 0))
    if kind == "distinct":
        order = [torch.randperm(end + top_k, generator=rng)[:top_k] for _ in range(tokens)]
        ids = torch.stack(order) if tokens else torch.empty(shape, dtype=torch.int64)
    else:
        ids = torch.randint(-1, end + 2, shape, generator=rng)
    if experts > 1:
        ids[ids == start + experts // 2] = -1  # this one gets no tokens
    if kind == "huge" and ids.numel():
        ids.view(-1)[::3] += 2**32
        ids.view(-1)[0] = -(2**63)
    return ids


def counts(experts: int, m: int, rng: torch.Generator) -> torch.Tensor:
    """Return int32 row counts of each expert in [0, m]; one of several is 0 and one is full."""
    rows = torch.randint(0, m + 1, (experts,), generator=rng).to(torch.int32)
    if experts:
        rows[-1] = m
    if experts > 1:
        rows[experts // 2 if experts > 2 else 0] = 0
    return rows


def segments(experts: int, most: int, alignment: int, rng: torch.Generator) -> torch.Tensor:
    """Return m_indices (m,) int32 of padded segments, with whole unused tiles at the end."""
    parts = []
    for expert, rows in enumerate(counts(experts, most, rng).tolist()):
        padding = -rows % alignment
        parts += [torch.full((rows,), expert), torch.full((padding,), -1)]
    parts.append(torch.full((alignment if experts else 0,), -1))
    return torch.cat(parts).to(torch.int32)


def poison_padding(tensor: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Fill the rows that are not valid with NaNs, in place: bytes 0x7f, or all bits set."""
    fill = 0x7F if tensor.dtype == torch.float8_e4m3fn else 0xFF
    padding = torch.full_like(tensor.contiguous().view(torch.uint8), fill).view(tensor.dtype)
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[~valid] = padding.view(torch.uint8)[~valid]
    else:
        tensor[~valid] = padding[~valid]
    return tensor
