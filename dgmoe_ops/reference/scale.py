"""Oracles of the scale room, and the scale layouts and group scales that other rooms need."""

from __future__ import annotations

import torch

from ._float import (
    INF_BITS,
    NAN_BITS,
    bits_float,
    ceil_div,
    decode_ue8m0,
    encode_e4m3,
    encode_ue8m0,
    float_bits,
    on_cpu,
    round_up,
    wrap_int32,
)

ROW_MAJOR, MN_MAJOR, PACKED = 0, 1, 2
UNIT = 0x3F800000
POISON = -1  #: all bits set: a NaN as fp32, four NaN bytes as UE8M0


def pack_words(byte: torch.Tensor) -> torch.Tensor:
    """Return int32 words of four bytes of the last dimension, little end first, zero-padded."""
    groups = byte.shape[-1]
    words = ceil_div(groups, 4)
    full = torch.zeros((*byte.shape[:-1], words * 4), dtype=torch.int64)
    full[..., :groups] = byte
    full = full.view(*byte.shape[:-1], words, 4)
    return wrap_int32((full << torch.tensor([0, 8, 16, 24])).sum(-1))


def unpack_words(words: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the first `groups` bytes of int32 words, int64."""
    byte = (words.long().unsqueeze(-1) >> torch.tensor([0, 8, 16, 24])) & 0xFF
    return byte.reshape(*words.shape[:-1], words.shape[-1] * 4)[..., :groups]


def dequantized_scale(scale: torch.Tensor, groups: int) -> torch.Tensor:
    """Return float64 scales (.., groups) of an fp32 or packed UE8M0 tensor."""
    if scale.dtype == torch.int32:
        return decode_ue8m0(unpack_words(scale, groups)).double()
    return scale.double()


def unit_words(groups: int, form: int) -> torch.Tensor:
    """Return one row of int32 words that holds scale 1 in every group."""
    if form == PACKED:
        return pack_words(torch.full((groups,), 127))
    return torch.full((groups,), UNIT, dtype=torch.int32)


def scale_tensor(words: torch.Tensor, form: int, slack: torch.Tensor | None = None) -> torch.Tensor:
    """Lay out words (.., mn, columns) as a scale tensor of `form`.

    The rows of alignment slack hold `slack` (columns,), or poison.
    """
    *batch, mn, columns = words.shape
    count = batch[0] if batch else 1
    leading = mn if form == ROW_MAJOR else round_up(mn, 4)
    strides = (columns, 1) if form == ROW_MAJOR else (1, leading)
    flat = torch.full((count * leading * columns,), POISON, dtype=torch.int32)
    whole = flat.as_strided((count, leading, columns), (leading * columns, *strides))
    whole[:, :mn] = words.reshape(count, mn, columns)
    if slack is not None:
        whole[:, mn:] = slack
    if form != PACKED:
        flat = flat.view(torch.float32)
    batch_stride = [leading * columns] if batch else []
    return flat.as_strided(words.shape, (*batch_stride, *strides))


def scale_words(scale: torch.Tensor, byte: torch.Tensor, form: int) -> torch.Tensor:
    """Return the words (.., columns) that `form` stores for fp32 scales and their UE8M0 bytes."""
    return pack_words(byte) if form == PACKED else scale.contiguous().view(torch.int32)


def group_scale(
    amax_bits: torch.Tensor, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scale (fp32), UE8M0 byte and multiplier (fp32) for these bits of the largest |x|."""
    broken = amax_bits >= INF_BITS
    nan = bits_float(torch.full_like(amax_bits, NAN_BITS))
    amax = torch.where(broken, 1.0, bits_float(amax_bits)).clamp(min=1e-10)
    if power_of_two:
        # a / 448 = (m / 0.875) 2^(k - 9) for a = m 2^k with m in [0.5, 1).
        mantissa, exponent = torch.frexp(amax.double())
        byte = 127 + exponent.long() - 9 + (mantissa > 0.875).long()
        scale, multiplier = bits_float(byte << 23), bits_float((254 - byte) << 23)
    else:
        byte = torch.zeros_like(amax_bits)
        scale = amax * bits_float(torch.tensor(0x3B124925))
        # Not 448 / amax, which PyTorch computes as a reciprocal and a product.
        multiplier = torch.full_like(amax, 448.0) / amax
    return (
        torch.where(broken, nan, scale),
        torch.where(broken, 255, byte),
        torch.where(broken, nan, multiplier),
    )


def quantize_groups(
    x: torch.Tensor, group_size: int, form: int, round_scale: bool, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x (rows, k) fp32 and return bytes (rows, width) and scale words (rows, columns).

    Columns from k to `width` are zero.
    """
    rows, k = x.shape
    width = k if width is None else width
    groups = ceil_div(width, group_size)
    padded = torch.zeros((rows, groups * group_size), dtype=torch.float32)
    padded[:, :k] = x
    grouped = padded.view(rows, groups, group_size)
    amax_bits = (float_bits(grouped) & 0x7FFFFFFF).amax(-1)
    scale, byte, multiplier = group_scale(amax_bits, round_scale or form == PACKED)
    q = encode_e4m3(grouped * multiplier.unsqueeze(-1)).view(rows, groups * group_size)
    q[:, k:] = 0
    return q[:, :width].clone(memory_format=torch.contiguous_format), scale_words(scale, byte, form)


@on_cpu
def pack_ue8m0_ref(scale: torch.Tensor) -> torch.Tensor:
    slack = unit_words(scale.shape[-1], PACKED)
    byte = encode_ue8m0(scale) if scale.dtype == torch.float32 else scale.view(torch.uint8)
    return scale_tensor(pack_words(byte), PACKED, slack)


@on_cpu
def unpack_ue8m0_ref(packed: torch.Tensor, groups: int) -> torch.Tensor:
    byte = unpack_words(packed, groups)
    return decode_ue8m0(byte).clone(memory_format=torch.contiguous_format)


@on_cpu
def align_scale_ref(scale: torch.Tensor) -> torch.Tensor:
    words = scale.contiguous().view(torch.int32)
    return scale_tensor(words, MN_MAJOR, unit_words(scale.shape[-1], MN_MAJOR))
