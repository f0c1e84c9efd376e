"""The forms in which checkpoints bring expert weights, told from dtypes and shapes."""

from __future__ import annotations

import enum
from typing import NoReturn

import torch

from .layouts import GROUPS_PER_WORD, MX_GROUP, WEIGHT_BLOCK, ceil_div

F8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FLOATS = (torch.bfloat16, torch.float32)
#: two e2m1 codes a byte
FP4_DTYPES = (torch.int8, torch.uint8)
#: a UE8M0 scale: exponent bytes, or float32 powers of two
EXPONENTS = (torch.uint8, E8M0, torch.float32)


class WeightFormat(enum.Enum):
    """What the weights are and what their scales cover."""

    FLOAT = "bfloat16 or float32"
    FP8_BLOCK = "float8_e4m3fn with a scale a 128x128 block"
    FP8_TENSOR = "float8_e4m3fn with a scale a tensor"
    MXFP8 = "float8_e4m3fn with a UE8M0 scale a row and 32 columns"
    MXFP4 = "packed e2m1 with a UE8M0 scale a row and 32 columns"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def values_per_element(weight: torch.Tensor) -> int:
    return 2 if weight.dtype in FP4_DTYPES else 1


def weight_dtypes(form: WeightFormat) -> tuple[torch.dtype, ...]:
    return {WeightFormat.FLOAT: FLOATS, WeightFormat.MXFP4: FP4_DTYPES}.get(form, (F8,))


def scale_shapes(
    form: WeightFormat, experts: int, n: int, k: int, halves: int
) -> list[tuple[int, ...]]:
    """The shapes that the scales of `form` may have; blocks never lie across gate and up."""
    if form is WeightFormat.FP8_BLOCK:
        rows = halves * ceil_div(n // halves, WEIGHT_BLOCK)
        return [(experts, rows, ceil_div(k, WEIGHT_BLOCK))]
    if form is WeightFormat.FP8_TENSOR:
        return list(dict.fromkeys([(), (experts,), (experts, 1), (experts, halves)]))
    return [(experts, n, ceil_div(k, MX_GROUP))]


def packed_shape(form: WeightFormat, experts: int, n: int, k: int) -> tuple[int, ...]:
    """The shape of prepared, packed UE8M0 scales."""
    group = WEIGHT_BLOCK if form is WeightFormat.FP8_BLOCK else MX_GROUP
    return (experts, n, ceil_div(ceil_div(k, group), GROUPS_PER_WORD))


def _fits(form: WeightFormat, weight: torch.Tensor, scale: torch.Tensor, halves: int) -> bool:
    experts, n, k = weight.shape
    k *= values_per_element(weight)
    shape = tuple(scale.shape)
    if scale.dtype == torch.int32:
        packable = form is not WeightFormat.FP8_TENSOR
        return packable and shape == packed_shape(form, experts, n, k)
    dtypes = (torch.float32,) if form is WeightFormat.FP8_TENSOR else EXPONENTS
    return scale.dtype in dtypes and shape in scale_shapes(form, experts, n, k, halves)


def formats_of(
    weight: torch.Tensor, scale: torch.Tensor | None, halves: int, among: tuple[WeightFormat, ...]
) -> list[WeightFormat]:
    """The forms among these that the weight (experts, n, k) and its scale can be."""
    forms = [form for form in among if weight.dtype in weight_dtypes(form)]
    if scale is None:
        return [form for form in forms if form is WeightFormat.FLOAT]
    return [f for f in forms if f is not WeightFormat.FLOAT and _fits(f, weight, scale, halves)]


def refuse_weight(
    where: str,
    arg: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    halves: int,
    among: tuple[WeightFormat, ...],
) -> NoReturn:
    """Say which of the weight and its scale is wrong, and what would be right."""
    forms = [form for form in among if weight.dtype in weight_dtypes(form)]
    if not forms:
        dtypes = dict.fromkeys(name(d) for form in among for d in weight_dtypes(form))
        raise ValueError(
            f"{where}: {arg} must be one of {', '.join(dtypes)}, got {name(weight.dtype)}"
        )
    quantized = [form for form in forms if form is not WeightFormat.FLOAT]
    if (scale is not None) != bool(quantized):
        # Floats and quantised dtypes do not overlap.
        got = None if scale is None else f"a {name(scale.dtype)} tensor"
        raise ValueError(
            f"{where}: {arg}_scale must be given for quantised {arg} and only for it, got {got}"
            f" for {name(weight.dtype)} {arg}"
        )
    experts, n, k = weight.shape
    k *= values_per_element(weight)
    wanted = []
    for form in quantized:
        shapes = scale_shapes(form, experts, n, k, halves)
        dtypes = (torch.float32,) if form is WeightFormat.FP8_TENSOR else EXPONENTS
        wanted.append(f"{'/'.join(map(name, dtypes))} of shape {' or '.join(map(str, shapes))}")
    raise ValueError(
        f"{where}: {arg}_scale must be {', or '.join(wanted)}, for {name(weight.dtype)} {arg}"
        f" {tuple(weight.shape)}, got {name(scale.dtype)} {tuple(scale.shape)}"
    )
