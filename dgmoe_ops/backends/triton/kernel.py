"""The kernel: a tile of weight rows times a tile of tokens, weights as the left operand.

Weights stand on the tensor core's 64-row side, tokens on its narrow one: a tile of 16 tokens wastes
nothing. Operands are e4m3; a step is 128 columns.

MXFP4: an e2m1 value times 2^d is exact in e4m3 for d in [-5, 6], zero included. So the four groups
of a row's 128 columns are brought to the largest of their exponents while they are decoded, and one
product of 128 columns is scaled, once. Where the exponents of a row lie further apart than that, or
near the ends of their range, the tile is computed again, group by group.

MXFP8: a product and a scaling for every group of 32 columns.

Products of scales are powers of two in fp32: exact unless they leave its range.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPREAD = tl.constexpr(11)  # exponents that a row's groups may lie apart in one product

# Four bytes of two codes each, and the table of magnitudes at the group's exponent, to the e4m3
# bytes of the low and of the high codes. prmt looks up by three bits of a code; the sign is bit 3.
_DECODE = tl.constexpr("""
{
.reg .b32 mag, s0, s1, r0, r1, hi;
and.b32 mag, $2, 0x77777777;
shr.b32 hi, mag, 16;
prmt.b32 r0, $3, $7, mag;
prmt.b32 r1, $3, $7, hi;
prmt.b32 $0, r0, r1, 0x6420;
prmt.b32 $1, r0, r1, 0x7531;
shl.b32 s0, $2, 4;
lop3.b32 $0, s0, 0x80808080, $0, 0xEA;
lop3.b32 $1, $2, 0x80808080, $1, 0xEA;
}
""")


@triton.jit
def _power(exponent):
    """2^(exponent - 127) for a byte; NaN for 255."""
    value = tl.maximum(exponent << 23, 0x00400000).to(tl.float32, bitcast=True)
    return value * 0.0 + value  # 255 reads as infinity, which this makes NaN


@triton.jit
def _e4m3(codes, d):
    """e4m3 bytes of x * 2^d for e2m1 codes, d in [-5, 6]."""
    magnitude = codes & 7
    exponent = magnitude >> 1
    normal = ((exponent + 6) << 3) + ((magnitude & 1) << 2)
    small = magnitude * 0x30  # zero, or one half
    bits = tl.where(exponent == 0, small, normal)
    bits = tl.where(magnitude == 0, 0, bits + (d << 3))
    return (bits | ((codes & 8) << 4)).to(tl.uint8)


@triton.jit
def _decode(packed, d, ASM: tl.constexpr):
    """e2m1 pairs (rows, half) with exponents d (rows, half), to e4m3 (rows, 2 half)."""
    if ASM:
        low = 0x3C383000 + d * 0x08080800
        high = 0x4C484440 + d * 0x08080808
        first, second = tl.inline_asm_elementwise(
            _DECODE,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [packed, low, high],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        codes = packed.to(tl.int32)
        first = _e4m3(codes & 15, d)
        second = _e4m3((codes >> 4) & 15, d)
    both = tl.join(first, second)
    rows: tl.constexpr = packed.shape[0]
    half: tl.constexpr = packed.shape[1]
    return tl.reshape(both, (rows, 2 * half)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _rows(at, mask):
    return tl.load(at) if mask is None else tl.load(at, mask=mask, other=0)


@triton.jit
def _tokens(at, mask):
    return tl.load(at) if mask is None else tl.load(at, mask=mask[:, None], other=0.0)


@triton.jit
def _weight_offsets(n0, n, BN: tl.constexpr, EVEN_N: tl.constexpr):
    rows = n0 + tl.arange(0, BN)
    return rows if EVEN_N else tl.minimum(rows, n - 1)


@triton.jit
def _mxfp4_block(
    acc, apart, block, a_at, a_scale_at, a_mask, b_at, b_scale_at, a_leading, b_leading,
    BM: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One product of 128 columns; `apart` notes rows whose groups it cannot hold."""
    a_word = _rows(a_scale_at + (block // 4) * a_leading, a_mask)
    b_word = tl.load(b_scale_at + block * b_leading)
    x = _tokens(a_at + block * 128, a_mask)
    packed = tl.load(b_at + block * 64)
    e0, e1, e2, e3 = b_word & 255, (b_word >> 8) & 255, (b_word >> 16) & 255, (b_word >> 24) & 255
    top = tl.maximum(tl.maximum(e0, e1), tl.maximum(e2, e3))
    bottom = tl.minimum(tl.minimum(e0, e1), tl.minimum(e2, e3))
    spread = tl.where((top > 250) | (top < 10), 255, top - bottom)
    apart = tl.maximum(apart, spread)
    # 8 bits of each group's word stand above the bytes of the group.
    shift = (tl.arange(0, 64) // 16) * 8
    exponent = (b_word[:, None] >> shift[None, :]) & 255
    d = tl.maximum(exponent - top[:, None] + 6, -5)
    w = _decode(packed, d, ASM)
    part = tl.dot(w, tl.trans(x))
    a_factor = _power((a_word >> ((block % 4) * 8)) & 255)
    b_factor = ((top - 6) << 23).to(tl.float32, bitcast=True)
    acc += part * a_factor[None, :] * b_factor[:, None]
    return acc, apart


@triton.jit
def _mxfp4_group(
    acc, block, group, a_at, a_scale_at, a_mask, b_at, b_scale_at, a_leading, b_leading,
    BM: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One product of 32 columns, whatever the exponents."""
    a_word = _rows(a_scale_at + (block // 4) * a_leading, a_mask)
    b_word = tl.load(b_scale_at + block * b_leading)
    x = _tokens(a_at + block * 128 + group * 32, a_mask)
    packed = tl.load(b_at + block * 64 + group * 16)
    w = _decode(packed, tl.zeros((BN, 16), tl.int32), ASM)
    part = tl.dot(w, tl.trans(x))
    a_factor = _power((a_word >> ((block % 4) * 8)) & 255)
    b_factor = _power((b_word >> (group * 8)) & 255)
    return acc + part * (a_factor[None, :] * b_factor[:, None])


@triton.jit
def _mxfp8_block(
    acc, block, a_at, a_scale_at, a_mask, b_at, b_scale_at, a_leading, b_leading,
    A_GROUPS: tl.constexpr,
):  # fmt: skip
    """Four products of 32 columns."""
    if A_GROUPS == 4:
        a_word = _rows(a_scale_at + block * a_leading, a_mask)
    else:
        a_word = _rows(a_scale_at + (block // 4) * a_leading, a_mask)
        a_factor = _power((a_word >> ((block % 4) * 8)) & 255)
    b_word = tl.load(b_scale_at + block * b_leading)
    for group in tl.static_range(4):
        x = _tokens(a_at + block * 128 + group * 32, a_mask)
        w = tl.load(b_at + block * 128 + group * 32)
        part = tl.dot(w, tl.trans(x))
        if A_GROUPS == 4:
            a_factor = _power((a_word >> (group * 8)) & 255)
        b_factor = _power((b_word >> (group * 8)) & 255)
        acc += part * (a_factor[None, :] * b_factor[:, None])
    return acc


@triton.jit
def _tile(
    a, a_scale, b, b_scale, d, row0, valid, expert, scale_expert, scale_row0, n0,
    n: tl.constexpr, k: tl.constexpr,
    a_scale_batch, a_leading, b_scale_batch, b_leading,
    FP4: tl.constexpr, A_GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN_N: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """d[row0 : row0 + valid, n0 : n0 + BN], rows counted over all experts."""
    rows = tl.arange(0, BM)
    in_tile = rows < valid
    # Few rows: what is not there is not read. Many: the last one is read again, without predicates.
    MASK: tl.constexpr = BM <= 32
    a_rows_at = rows if MASK else tl.minimum(rows, valid - 1)
    a_mask = in_tile if MASK else None
    n_rows = _weight_offsets(n0, n, BN, EVEN_N)
    row_bytes = k // 2 if FP4 else k
    K: tl.constexpr = 128 if FP4 else 32
    B: tl.constexpr = 64 if FP4 else 32
    a_rows = a + row0 * k
    a_at = a_rows + a_rows_at[:, None] * k + tl.arange(0, K)[None, :]
    b_rows = b + expert.to(tl.int64) * n * row_bytes
    b_at = b_rows + n_rows[:, None] * row_bytes + tl.arange(0, B)[None, :]
    a_scale_at = a_scale + scale_expert.to(tl.int64) * a_scale_batch + scale_row0 + a_rows_at
    b_scale_at = b_scale + expert.to(tl.int64) * b_scale_batch + n_rows
    acc = tl.zeros((BN, BM), tl.float32)
    if FP4:
        apart = tl.zeros((BN,), tl.int32)
        for block in tl.range(0, k // 128, num_stages=STAGES):
            acc, apart = _mxfp4_block(
                acc, apart, block, a_at, a_scale_at, a_mask, b_at, b_scale_at, a_leading, b_leading,
                BM, BN, ASM,
            )  # fmt: skip
        if tl.max(apart, axis=0) > SPREAD:
            acc = tl.zeros((BN, BM), tl.float32)
            a_at32 = a_rows + a_rows_at[:, None] * k + tl.arange(0, 32)[None, :]
            b_at16 = b_rows + n_rows[:, None] * row_bytes + tl.arange(0, 16)[None, :]
            for step in tl.range(0, k // 32, num_stages=1):
                acc = _mxfp4_group(
                    acc, step // 4, step % 4, a_at32, a_scale_at, a_mask, b_at16, b_scale_at,
                    a_leading, b_leading, BM, BN, ASM,
                )  # fmt: skip
    else:
        for block in tl.range(0, k // 128, num_stages=STAGES):
            acc = _mxfp8_block(
                acc, block, a_at, a_scale_at, a_mask, b_at, b_scale_at, a_leading, b_leading,
                A_GROUPS,
            )  # fmt: skip
    out = tl.trans(acc).to(tl.bfloat16)
    columns = n0 + tl.arange(0, BN)
    at = d + row0 * n + rows[:, None] * n + columns[None, :]
    mask = in_tile[:, None] if EVEN_N else in_tile[:, None] & (columns < n)[None, :]
    tl.store(at, out, mask=mask)


_PLAIN = ["experts", "m", "a_scale_batch", "a_leading", "b_scale_batch", "b_leading"]


@triton.jit(do_not_specialize=_PLAIN)
def masked_kernel(
    a, a_scale, b, b_scale, masked_m, d, experts, m, n: tl.constexpr, k: tl.constexpr,
    a_scale_batch, a_leading, b_scale_batch, b_leading,
    EXPERTS: tl.constexpr, FP4: tl.constexpr, A_GROUPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles of all experts in one row, dealt out to the programs in turn."""
    index = tl.arange(0, EXPERTS)
    counts = tl.load(masked_m + index, mask=index < experts, other=0)
    n_tiles = tl.cdiv(n, BN)
    ends = tl.cumsum(tl.cdiv(counts, BM) * n_tiles, axis=0)
    total = tl.max(ends, axis=0)
    tile = tl.program_id(0)
    while tile < total:
        before = ends <= tile
        expert = tl.sum(before.to(tl.int32), axis=0)
        start = tl.max(tl.where(before, ends, 0), axis=0)
        count = tl.sum(tl.where(index == expert, counts, 0), axis=0)
        # Tiles of the same weight rows stand next to each other.
        m_tiles = tl.cdiv(count, BM)
        local = tile - start
        m0 = (local % m_tiles) * BM
        n0 = (local // m_tiles) * BN
        row0 = expert.to(tl.int64) * m + m0
        _tile(
            a, a_scale, b, b_scale, d, row0, count - m0, expert, expert, m0, n0, n, k,
            a_scale_batch, a_leading, b_scale_batch, b_leading,
            FP4, A_GROUPS, BM, BN, EVEN_N, STAGES, ASM,
        )  # fmt: skip
        tile += tl.num_programs(0)


@triton.jit(do_not_specialize=_PLAIN)
def contig_kernel(
    a, a_scale, b, b_scale, m_indices, d, experts, m, n: tl.constexpr, k: tl.constexpr,
    a_scale_batch, a_leading, b_scale_batch, b_leading,
    FP4: tl.constexpr, A_GROUPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A program for 128 rows and BN columns; rows of an expert stand before its padding."""
    blocks = m // 128
    segment = tl.program_id(0) % blocks
    n0 = (tl.program_id(0) // blocks) * BN
    for part in range(128 // BM):
        m0 = segment * 128 + part * BM
        indices = tl.load(m_indices + m0 + tl.arange(0, BM))
        expert = tl.max(indices, axis=0)
        if expert >= 0:
            valid = tl.sum((indices >= 0).to(tl.int32), axis=0)
            _tile(
                a, a_scale, b, b_scale, d, m0.to(tl.int64), valid, expert, 0 * expert, m0, n0, n, k,
                a_scale_batch, a_leading, b_scale_batch, b_leading,
                FP4, A_GROUPS, BM, BN, EVEN_N, STAGES, ASM,
            )  # fmt: skip
