"""Scale tensors as the tensor cores' kernels read them: which layout one has, and which it must
have.

Checked here because a backend would copy or convert other scales on every call, padding rows
included, fail without naming anything, or trap on the device.
"""

from __future__ import annotations

import torch

from ..formats.layouts import TMA_ELEMENTS, ScaleLayout, round_up, scale_sizes_and_strides
from .request import refuse

_HELPERS = {
    ScaleLayout.MN_MAJOR: " (dgmoe_ops.ops.align_scale makes it so)",
    ScaleLayout.ROW_MAJOR: ", one scale a 128x128 block",
    ScaleLayout.PACKED_UE8M0: " (dgmoe_ops.ops.pack_ue8m0 makes it so)",
}
_MUST = {
    ScaleLayout.MN_MAJOR: "be MN-major and TMA-aligned",
    ScaleLayout.ROW_MAJOR: "be contiguous float32",
    ScaleLayout.PACKED_UE8M0: "be packed UE8M0 int32, MN-major,",
}


def dtype_of(layout: ScaleLayout) -> torch.dtype:
    """The dtype of scales in a layout."""
    return torch.int32 if layout == ScaleLayout.PACKED_UE8M0 else torch.float32


def scale_layout_text(scale: torch.Tensor) -> str:
    """Name the form of a scale tensor by its dtype and strides."""
    packed = scale.dtype == torch.int32
    kind = "packed UE8M0 int32" if packed else str(scale.dtype).removeprefix("torch.")
    order = "MN-major" if scale.stride(-2) == 1 else "strided"
    if scale.is_contiguous():
        order = "row-major"
    return f"{kind} {order}, shape {tuple(scale.shape)}, strides {scale.stride()}"


def is_mn_major(scale: torch.Tensor) -> bool:
    """Tell whether columns are contiguous and start on 16 bytes, as TMA reads them."""
    *batch, rows, columns = scale.shape
    *batch_stride, row_stride, column_stride = scale.stride()
    leading = round_up(rows, TMA_ELEMENTS)
    if column_stride != leading or (row_stride != 1 and rows != 1):
        return False
    return not batch or batch_stride[0] == leading * columns


def _strides_of(scale: torch.Tensor, layout: ScaleLayout) -> tuple[int, ...]:
    """The strides of a fresh tensor of these sizes in a layout; columns of packed scales are
    words."""
    *batch, rows, columns = scale.shape
    form = layout if layout == ScaleLayout.ROW_MAJOR else ScaleLayout.MN_MAJOR
    return scale_sizes_and_strides(batch[0] if batch else None, rows, columns, form)[1]


def is_laid_out(scale: torch.Tensor, layout: ScaleLayout) -> bool:
    """Tell whether scales have the strides of a layout, but for those of size-1 dimensions.

    Copies and conversions lose these. Where columns end in slack up to their 16 bytes, these count
    too: they tell whether it is there.
    """
    slack = layout != ScaleLayout.ROW_MAJOR and scale.shape[-2] % TMA_ELEMENTS != 0
    if slack:
        return is_mn_major(scale)
    wanted = zip(scale.shape, scale.stride(), _strides_of(scale, layout), strict=True)
    return all([size == 1 or have == want for size, have, want in wanted])


def with_strides_of(scale: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """View scales with all strides of a layout where those of size-1 dimensions alone differ: the
    library compares these, too."""
    strides = _strides_of(scale, layout)
    if scale.stride() == strides or not is_laid_out(scale, layout):
        return scale
    return scale.as_strided(scale.shape, strides)


def has_layout(scale: torch.Tensor, layout: ScaleLayout) -> bool:
    """Tell whether a scale tensor has a layout."""
    if scale.dtype != dtype_of(layout):
        return False
    return scale.is_contiguous() if layout == ScaleLayout.ROW_MAJOR else is_mn_major(scale)


def check_scale(op: str, arg: str, scale: torch.Tensor, layout: ScaleLayout, arch: str) -> None:
    """Check the layout of one scale tensor.

    Raises:
        ValueError: it has another one; the message says what makes it right.
    """
    got = scale_layout_text(scale)
    if layout == ScaleLayout.MN_MAJOR and scale.dtype != torch.float32:
        raise refuse(op, arg, f"be float32 on {arch}", got)
    if not has_layout(scale, layout):
        row_major = layout == ScaleLayout.ROW_MAJOR
        where, tail = ("", f", on {arch}") if row_major else (f" on {arch}", "")
        raise refuse(op, arg, f"{_MUST[layout]}{where}{_HELPERS[layout]}{tail}", got)
