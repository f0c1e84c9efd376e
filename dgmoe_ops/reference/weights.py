"""Oracles of the weights room: quantisation of checkpoint weights, and one form to another."""

from __future__ import annotations

import torch

from ._float import (
    bits_float,
    ceil_div,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    float_bits,
    on_cpu,
)
from .scale import group_scale

BLOCK = 128
GROUP = 32


def _dense(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous copy; of an empty tensor too, whose strides others leave as they were."""
    return torch.empty(tuple(values.shape), dtype=dtype).copy_(values)


def _block_at(row: int, column: int) -> tuple:
    """The index of a block of the last two dimensions."""
    return (
        ...,
        slice(row * BLOCK, (row + 1) * BLOCK),
        slice(column * BLOCK, (column + 1) * BLOCK),
    )


def _exponent_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Return the exponent bytes (int64) of scales: 0 for zero, 255 for what is no power of two."""
    if scale.dtype != torch.float32:
        return scale.contiguous().view(torch.uint8).long()
    mantissa, exponent = torch.frexp(scale.double())
    byte = exponent.long() - 1 + 127
    power = (mantissa == 0.5) & (byte >= 0)
    byte = torch.where(power, byte, 255)
    return torch.where(scale == 0, 0, byte)


@on_cpu
def quant_block_fp8_ref(
    weight: torch.Tensor, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, n, k = weight.shape
    rows, columns = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    q = torch.zeros(tuple(weight.shape), dtype=torch.uint8)
    scale = torch.zeros((*batch, rows, columns), dtype=torch.float32)
    for row in range(rows):
        for column in range(columns):
            at = _block_at(row, column)
            block = weight[at].float()
            amax_bits = (float_bits(block) & 0x7FFFFFFF).amax((-1, -2))
            value, _, multiplier = group_scale(amax_bits, round_scale)
            q[at] = encode_e4m3(block * multiplier[..., None, None])
            scale[..., row, column] = value
    return q.view(torch.float8_e4m3fn), scale


@on_cpu
def requant_block_ue8m0_ref(
    weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, n, k = weight.shape
    rows, columns = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    code = weight.contiguous().view(torch.uint8)
    q = torch.zeros(tuple(weight.shape), dtype=torch.uint8)
    out = torch.zeros((*batch, rows, columns), dtype=torch.uint8)
    known = _exponent_bytes(scale)
    if scale.dtype == torch.float32:
        keep = (known != 255) & (scale != 0)
    else:
        keep = torch.ones_like(known, dtype=torch.bool)
        scale = torch.ones(known.shape)
    for row in range(rows):
        for column in range(columns):
            at = _block_at(row, column)
            # A product of fp32 rounded once, as in float64 rounded after.
            block = (decode_e4m3(code[at]) * scale[..., row, column, None, None].double()).float()
            amax_bits = (float_bits(block) & 0x7FFFFFFF).amax((-1, -2))
            _, byte, multiplier = group_scale(amax_bits, True)
            again = encode_e4m3(block * multiplier[..., None, None])
            kept = keep[..., row, column]
            q[at] = torch.where(kept[..., None, None], code[at], again)
            out[..., row, column] = torch.where(kept, known[..., row, column], byte)
    return q.view(torch.float8_e4m3fn), out


@on_cpu
def dequant_mxfp4_to_fp8_ref(
    weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, n, half = weight.shape
    k = half * 2
    pairs = weight.contiguous().view(torch.uint8).long()
    values = decode_e2m1(torch.stack((pairs % 16, pairs // 16), -1).reshape(*batch, n, k)).double()
    byte = _exponent_bytes(scale)
    rows, columns = ceil_div(n, BLOCK), ceil_div(k, BLOCK)
    out = torch.zeros((*batch, rows, columns), dtype=torch.uint8)
    finite = torch.where(byte == 255, 0, byte)
    for row in range(rows):
        for column in range(columns):
            groups = slice(column * BLOCK // GROUP, (column + 1) * BLOCK // GROUP)
            largest = finite[..., row * BLOCK : (row + 1) * BLOCK, groups].amax((-1, -2))
            out[..., row, column] = (largest - 6).clamp(min=0)
    block = out.long().repeat_interleave(BLOCK, -2)[..., :n, :]
    block = block.repeat_interleave(BLOCK, -1)[..., :k]
    group = byte.repeat_interleave(GROUP, -1)[..., :k]
    wanted = torch.ldexp(values, group - block)
    q = encode_e4m3(torch.where(group == 255, float("nan"), wanted).float())
    q = _dense(q, torch.uint8)
    return q.view(torch.float8_e4m3fn), out


def _grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (.., n, groups, 32) fp32 values, zero-padded, and the bits of each group's amax."""
    *lines, k = weight.shape
    groups = ceil_div(k, GROUP)
    padded = torch.zeros((*lines, groups * GROUP), dtype=torch.float32)
    padded[..., :k] = weight
    grouped = padded.view(*lines, groups, GROUP)
    return grouped, (float_bits(grouped) & 0x7FFFFFFF).amax(-1)


@on_cpu
def quant_mxfp8_ref(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *lines, k = weight.shape
    grouped, amax_bits = _grouped(weight)
    _, byte, multiplier = group_scale(amax_bits, True)
    q = encode_e4m3(grouped * multiplier.unsqueeze(-1)).view(*lines, byte.shape[-1] * GROUP)
    q = _dense(q[..., :k], torch.uint8)
    return q.view(torch.float8_e4m3fn), _dense(byte, torch.uint8)


def _squared_error(units: torch.Tensor, factor: float) -> torch.Tensor:
    """Return fp32 sums of squared errors under a scale of `factor`: eights in order, then pairs."""
    error = units - decode_e2m1(encode_e2m1(units / factor)) * factor
    square = (error * error).view(*units.shape[:-1], 4, 8)
    sums = torch.zeros(square.shape[:-1])
    for i in range(8):
        sums = sums + square[..., i]
    return (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


@on_cpu
def quant_mxfp4_ref(
    weight: torch.Tensor, search: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    *lines, k = weight.shape
    grouped, amax_bits = _grouped(weight)
    broken = amax_bits >= 0x7F800000
    amax = torch.where(broken, 1.0, bits_float(amax_bits)).clamp(min=1e-10)
    # a / 6 = (m / 0.75) 2^(e - 3) for a = m 2^e with m in [0.5, 1).
    mantissa, exponent = torch.frexp(amax.double())
    byte = 127 + exponent.long() - 3 + (mantissa > 0.75).long()
    finite = torch.where(broken.unsqueeze(-1), 0.0, grouped)
    if search:
        units = finite / decode_ue8m0(byte).unsqueeze(-1)
        plain, less, more = (_squared_error(units, factor) for factor in (1.0, 0.5, 2.0))
        chosen = torch.where(less < plain, byte - 1, byte)
        byte = torch.where(more < torch.minimum(less, plain), byte + 1, chosen)
    code = encode_e2m1(finite / decode_ue8m0(byte).unsqueeze(-1))
    code = torch.where(broken.unsqueeze(-1), 0, code).view(*lines, byte.shape[-1] * GROUP)[..., :k]
    q = _dense(code[..., ::2] + code[..., 1::2] * 16, torch.uint8)
    return q.view(torch.int8), _dense(torch.where(broken, 255, byte), torch.uint8)
