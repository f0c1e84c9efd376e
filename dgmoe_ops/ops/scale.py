"""Scale room: UE8M0 packing and the MN-major, TMA-aligned layouts that the GEMMs read."""

import torch

from ..formats.layouts import ScaleLayout, scale_sizes_and_strides
from ._registry import fake_of


def _empty_scale(like: torch.Tensor, batch, mn, groups, form: int) -> torch.Tensor:
    sizes, strides = scale_sizes_and_strides(batch, mn, groups, form)
    dtype = torch.int32 if form == ScaleLayout.PACKED_UE8M0 else torch.float32
    return like.new_empty_strided(sizes, strides, dtype=dtype)


def _batch_and_rows(scale: torch.Tensor):
    return (scale.shape[0] if scale.dim() == 3 else None), scale.shape[-2]


def pack_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Pack scales into words of UE8M0 exponent bytes; fp32 scales are rounded up.

    Args:
        scale: (mn, groups) or (batch, mn, groups) float32, or exponent bytes as uint8 or
            float8_e8m0fnu, any strides.

    Returns:
        (.., mn, ceil(groups / 4)) int32, strides (1, round_up(mn, 4)): byte `g % 4` of word `g //
        4` is group `g`. Finite positive fp32 scales give bytes 1 to 254; inf, NaN and negative
        ones give 255 (NaN). Bytes stay as they are, 0 (2^-127) too.

    Raises:
        ValueError: the dtype is none of these or the rank is not 2 or 3.

    Source: the OCP Microscaling (MX) specification 1.0, section 5.4.1 (E8M0).
    """
    return torch.ops.dgmoe.pack_ue8m0(scale)


@fake_of("pack_ue8m0")
def _pack_ue8m0_fake(scale):
    batch, rows = _batch_and_rows(scale)
    return _empty_scale(scale, batch, rows, scale.shape[-1], ScaleLayout.PACKED_UE8M0)


def unpack_ue8m0(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """Unpack UE8M0 exponent bytes into fp32 scales.

    Args:
        packed: (mn, ceil(groups / 4)) or (batch, mn, ceil(groups / 4)) int32, any strides.
        groups: scales a row; the last word may hold fewer than four.

    Returns:
        (.., mn, groups) float32, contiguous. Byte b is 2^(b-127); byte 255 is NaN.

    Raises:
        ValueError: the dtype is not int32, or `groups` does not fit the width.
    """
    return torch.ops.dgmoe.unpack_ue8m0(packed, groups)


@fake_of("unpack_ue8m0")
def _unpack_ue8m0_fake(packed, groups):
    return packed.new_empty((*packed.shape[:-1], groups), dtype=torch.float32)


def align_scale(scale: torch.Tensor) -> torch.Tensor:
    """Copy fp32 scales into the MN-major, TMA-aligned layout of SM90 GEMMs. Never an alias.

    Args:
        scale: (mn, groups) or (batch, mn, groups) float32, any strides.

    Returns:
        The same shape and values, strides (1, round_up(mn, 4)).

    Raises:
        ValueError: the dtype is not float32 or the rank is not 2 or 3.
    """
    return torch.ops.dgmoe.align_scale(scale)


@fake_of("align_scale")
def _align_scale_fake(scale):
    batch, rows = _batch_and_rows(scale)
    return _empty_scale(scale, batch, rows, scale.shape[-1], ScaleLayout.MN_MAJOR)
