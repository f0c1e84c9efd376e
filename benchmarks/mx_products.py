"""Operands of grouped GEMMs of MX recipes on a GPU, and what is right in float64."""

from __future__ import annotations

import torch


def pack(byte_scales: torch.Tensor) -> torch.Tensor:
    """[.., mn, groups] exponent bytes to packed int32, MN-major; groups a multiple of 4."""
    words = byte_scales.contiguous().view(torch.int32)
    *batch, mn, count = words.shape
    leading = -(-mn // 4) * 4
    out = torch.zeros(*batch, count, leading, dtype=torch.int32, device=words.device)
    out[..., :mn] = words.transpose(-1, -2)
    return out.transpose(-1, -2)[..., :mn, :]


def random_scale(batch: tuple[int, ...], mn: int, groups: int, device) -> torch.Tensor:
    """Bytes 120 to 127."""
    words, leading = -(-groups // 4), -(-mn // 4) * 4
    out = torch.randint(0, 1 << 31, (*batch, words, leading), dtype=torch.int32, device=device)
    out.bitwise_and_(0x07070707).bitwise_or_(0x78787878)
    return out.transpose(-1, -2)[..., :mn, :]


def unpack(words: torch.Tensor, groups: int) -> torch.Tensor:
    """Packed scales to float64 factors [.., mn, groups]."""
    parts = torch.stack([(words >> s) & 255 for s in (0, 8, 16, 24)], -1).flatten(-2)[..., :groups]
    factor = torch.exp2(parts.double() - 127)
    return torch.where(parts == 255, torch.nan, factor)


def values_of(b: torch.Tensor, fp4: bool) -> torch.Tensor:
    if not fp4:
        return b.double()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=b.device)
    table = torch.cat([table, -table])
    byte = b.view(torch.uint8)
    return torch.stack([table[(byte & 15).long()], table[(byte >> 4).long()]], -1).flatten(-2)


def random_e4m3(shape, device) -> torch.Tensor:
    """Random bytes without NaN, below 2 in size."""
    out = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    return out.bitwise_and_(0xBF).view(torch.float8_e4m3fn)


def routing(tokens: int, experts: int, top_k: int, seed: int, start: int) -> torch.Tensor:
    """Rows of each expert under random routing; one token takes `top_k` experts from `start` on, so
    that calls in a row read other weights."""
    if tokens == 1:
        ids = (torch.arange(top_k) + start) % experts
    else:
        rng = torch.Generator().manual_seed(seed)
        ids = torch.rand(tokens, experts, generator=rng).topk(top_k, 1).indices.flatten()
    return torch.bincount(ids, minlength=experts).to(torch.int32)


def indices_of(counts: torch.Tensor, rows: int) -> torch.Tensor:
    out = torch.full((rows,), -1, dtype=torch.int32)
    at = 0
    for expert, count in enumerate(counts.tolist()):
        out[at : at + count] = expert
        at += -(-count // 128) * 128
    return out


def reference(product, a, a_scale, b, b_scale, info, experts):
    """Of some experts: {expert: (rows of a, product, product of sizes)}."""
    masked, fp4, _, n, k, a_columns = product
    found = {}
    for e in experts:
        if masked:
            rows = torch.arange(int(info[e]), device=a.device)
            x, s = a[e, rows], a_scale[e, rows]
        else:
            rows = (info == e).nonzero().flatten()
            x, s = a[rows], a_scale[rows]
        x = x.double() * unpack(s, k // a_columns).repeat_interleave(a_columns, -1)
        w = values_of(b[e], fp4) * unpack(b_scale[e], k // 32).repeat_interleave(32, -1)
        found[e] = (rows, x @ w.T, x.abs() @ w.abs().T)
    return found


def wrong(product, d, found) -> float:
    """The largest error, in units of what is allowed: the rounding of the result, and what an fp8
    tensor core drops of |a| |b|, for it keeps some 13 bits of a partial sum."""
    worst = 0.0
    for e, (rows, right, size) in found.items():
        got = (d[e, rows] if product[0] else d[rows]).double()
        allowed = right.abs() * 2**-8 + size * 2**-11
        nan = right.isnan()
        if not torch.equal(got.isnan(), nan):
            return float("inf")
        error = ((got - right).abs() / allowed.clamp_min(1e-300))[~nan]
        if error.numel():
            worst = max(worst, float(error.max()))
    return worst
