"""Weight room: checkpoint weights and scales to what the GEMMs read."""

from __future__ import annotations

import torch

from ..formats.layouts import MX_GROUP, WEIGHT_BLOCK, ceil_div
from ._registry import fake_of


def _blocks(shape) -> tuple:
    """The shape of the 128x128 blocks of a weight."""
    *batch, n, k = shape
    return (*batch, ceil_div(n, WEIGHT_BLOCK), ceil_div(k, WEIGHT_BLOCK))


def _groups(shape) -> tuple:
    """The shape of the groups of 32 columns of a weight."""
    *lines, k = shape
    return (*lines, ceil_div(k, MX_GROUP))


def quant_block_fp8(
    weight: torch.Tensor, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to e4m3 with one fp32 scale a 128x128 block.

    Args:
        weight: (n, k) or (experts, n, k) bfloat16 or float32, any strides.
        round_scale: round scales up to powers of two, as UE8M0 targets need.

    Returns:
        q, the same shape in float8_e4m3fn, and scale (.., ceil(n / 128), ceil(k / 128)) float32,
        both contiguous.

    Raises:
        ValueError: the dtype or rank is not one of these.

    Source: DeepSeek-V3 technical report, section 3.3.2 (fine-grained quantisation).
    """
    return torch.ops.dgmoe.quant_block_fp8(weight, round_scale)


@fake_of("quant_block_fp8")
def _quant_block_fp8_fake(weight, round_scale=False):
    q = weight.new_empty(tuple(weight.shape), dtype=torch.float8_e4m3fn)
    return q, weight.new_empty(_blocks(weight.shape), dtype=torch.float32)


def requant_block_ue8m0(
    weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Requantise block FP8 weights so that every scale is a power of two.

    A block whose scale is one already keeps its scale and its bytes; another one is widened to fp32
    and quantised again, which rounds each value once more.

    Args:
        weight: (n, k) or (experts, n, k) float8_e4m3fn, any strides.
        scale: (.., ceil(n / 128), ceil(k / 128)) float32, or exponent bytes as uint8 or
            float8_e8m0fnu, any strides.

    Returns:
        q, the same shape, and scale (.., ceil(n / 128), ceil(k / 128)) uint8 exponent bytes: byte b
        is 2^(b-127), byte 255 is NaN. Both contiguous.

    Raises:
        ValueError: a dtype or shape is not one of these.
    """
    return torch.ops.dgmoe.requant_block_ue8m0(weight, scale)


@fake_of("requant_block_ue8m0")
def _requant_block_ue8m0_fake(weight, scale):
    q = weight.new_empty(tuple(weight.shape))
    return q, weight.new_empty(_blocks(weight.shape), dtype=torch.uint8)


def dequant_mxfp4_to_fp8(
    weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn MXFP4 weights into block FP8 weights with power-of-two scales.

    Exact where the group scales of a 128x128 block differ by at most 2^14; values below that round
    to nearest.

    Args:
        weight: (n, k / 2) or (experts, n, k / 2) int8 or uint8, two e2m1 codes a byte, the low
            nibble being the even column; any strides.
        scale: (.., n, ceil(k / 32)) exponent bytes as uint8 or float8_e8m0fnu, or float32 powers of
            two, any strides. Byte 255, and a float32 that is no power of two, is NaN and makes its
            group NaN.

    Returns:
        q (.., n, k) float8_e4m3fn, and scale (.., ceil(n / 128), ceil(k / 128)) uint8 exponent
        bytes, a block's largest group scale / 64; both contiguous.

    Raises:
        ValueError: a dtype or shape is not one of these.

    Source: the OCP Microscaling (MX) specification 1.0, section 5.3.3 (FP4).
    """
    return torch.ops.dgmoe.dequant_mxfp4_to_fp8(weight, scale)


@fake_of("dequant_mxfp4_to_fp8")
def _dequant_mxfp4_to_fp8_fake(weight, scale):
    *lines, half = weight.shape
    q = weight.new_empty((*lines, half * 2), dtype=torch.float8_e4m3fn)
    return q, weight.new_empty(_blocks(q.shape), dtype=torch.uint8)


def quant_mxfp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to MXFP8: e4m3 with a power-of-two scale a row and 32 columns.

    Args:
        weight: (n, k) or (experts, n, k) bfloat16 or float32, any strides.

    Returns:
        q, the same shape in float8_e4m3fn, and scale (.., n, ceil(k / 32)) uint8 exponent bytes,
        rounded up; both contiguous, the form of a checkpoint. A group with an inf or a NaN has
        scale byte 255, NaN.

    Raises:
        ValueError: the dtype or rank is not one of these.

    Source: the OCP Microscaling (MX) specification 1.0, section 6.3, with the scale rounded up so
    that nothing saturates.
    """
    return torch.ops.dgmoe.quant_mxfp8(weight)


@fake_of("quant_mxfp8")
def _quant_mxfp8_fake(weight):
    q = weight.new_empty(tuple(weight.shape), dtype=torch.float8_e4m3fn)
    return q, weight.new_empty(_groups(weight.shape), dtype=torch.uint8)


def quant_mxfp4(weight: torch.Tensor, search: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to MXFP4: two e2m1 codes a byte, a power-of-two scale a row and 32 columns.

    Args:
        weight: (n, k) or (experts, n, k) bfloat16 or float32, any strides; k even.
        search: choose each group's exponent by least squared error among the one by which nothing
            saturates and its two neighbours, instead of always the former.

    Returns:
        q (.., n, k / 2) int8, the low nibble being the even column, and scale (.., n, ceil(k / 32))
        uint8 exponent bytes; both contiguous, the form of a checkpoint. A group with an inf or a
        NaN has scale byte 255, NaN.

    Raises:
        ValueError: the dtype, the rank or an odd k.

    Source: the OCP Microscaling (MX) specification 1.0, sections 5.3.3 and 6.3; values round to
    nearest even.
    """
    return torch.ops.dgmoe.quant_mxfp4(weight, search)


@fake_of("quant_mxfp4")
def _quant_mxfp4_fake(weight, search=False):
    *lines, k = weight.shape
    q = weight.new_empty((*lines, k // 2), dtype=torch.int8)
    return q, weight.new_empty(_groups(weight.shape), dtype=torch.uint8)
