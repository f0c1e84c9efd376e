"""What a layer's tensors must look like: sizes, forms and shapes, told from the headers of the
files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats.layouts import MX_GROUP, WEIGHT_BLOCK, ceil_div
from ..formats.weights import EXPONENTS, WeightFormat, name, weight_dtypes
from .names import Layout, fail, pattern_of
from .source import Files, Info

_FLOAT_SCALES = (torch.float32, torch.bfloat16)  # a bfloat16 scale widens exactly
_SCALE_DTYPES = {
    WeightFormat.FP8_BLOCK: (*_FLOAT_SCALES, torch.uint8, torch.float8_e8m0fnu),
    WeightFormat.FP8_TENSOR: _FLOAT_SCALES,
    WeightFormat.MXFP8: EXPONENTS,
    WeightFormat.MXFP4: EXPONENTS,
}
_BIAS_DTYPES = (torch.float32, torch.bfloat16)
_BLOCK_BYTES = MX_GROUP // 2
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """The matrix of one stem for one expert.

    Attributes:
        layout, form: what it is stored as.
        rows, columns: in values.
        halves: 2 where gate and up are both in it.
        experts: of the tensor, where it holds all.
    """

    layout: Layout
    form: WeightFormat
    rows: int
    columns: int
    halves: int
    experts: int

    def _stacked(self, *shape: int) -> Shape:
        return (self.experts, *shape) if self.layout.fused else shape

    @property
    def values_per_element(self) -> int:
        """Columns in one step of the second index."""
        if self.layout.blocks:
            return MX_GROUP
        return 2 if self.form is WeightFormat.MXFP4 else 1

    @property
    def weight_shape(self) -> Shape:
        shape = (self.rows, self.columns // self.values_per_element)
        if self.layout.transposed:
            shape = shape[::-1]
        return self._stacked(*shape, *([_BLOCK_BYTES] if self.layout.blocks else []))

    @property
    def scale_units(self) -> tuple[int, int]:
        """Rows and columns that share a scale, where not all do."""
        return (
            (WEIGHT_BLOCK, WEIGHT_BLOCK) if self.form is WeightFormat.FP8_BLOCK else (1, MX_GROUP)
        )

    @property
    def scale_shapes(self) -> list[Shape]:
        if self.form is not WeightFormat.FP8_TENSOR:
            rows, columns = self.scale_units
            blocks = self.halves * ceil_div(self.rows // self.halves, rows)
            return [self._stacked(blocks, ceil_div(self.columns, columns))]
        if not self.layout.fused:
            return [(), (1,), (1, 1)]
        each = [(self.experts, n) for n in dict.fromkeys((1, self.halves))]
        return [(self.experts,), *each, *((*shape, 1) for shape in each)]

    @property
    def scale_layout(self) -> str:
        """What the scales may be, in words."""
        dtypes = "/".join(map(name, _SCALE_DTYPES[self.form]))
        return f"{dtypes} of shape {' or '.join(map(str, self.scale_shapes))}"

    def scale_fits(self, info: Info) -> bool:
        return info.dtype in _SCALE_DTYPES[self.form] and info.shape in self.scale_shapes


def dtype_name(info: Info) -> str:
    return info.dtype if isinstance(info.dtype, str) else name(info.dtype)


def _check(
    files: Files, tensor: str, dtypes: tuple[torch.dtype, ...], shapes: list[Shape], why: str
) -> None:
    info = files.info(tensor)
    if info.dtype not in dtypes:
        if info.dtype == torch.int32:
            why += " (int32 scales are packed for a target: save what export_weights gives)"
        fail(tensor, f"be {' or '.join(map(name, dtypes))}{why}", dtype_name(info))
    if info.shape not in shapes:
        fail(tensor, f"have shape {' or '.join(map(str, shapes))}{why}", info.shape)


def check_weight(files: Files, tensor: str, matrix: Matrix, like: str) -> None:
    """Check the values of one stem against the sizes that the tensor `like` gives."""
    why = f", as {like} is {dtype_name(files.info(like))} {files.info(like).shape}"
    _check(files, tensor, weight_dtypes(matrix.form), [matrix.weight_shape], why)


def check_scale(files: Files, tensor: str, matrix: Matrix, weight: str) -> None:
    why = f", as {weight} is {files.info(weight).shape}, {matrix.form.value}"
    _check(files, tensor, _SCALE_DTYPES[matrix.form], matrix.scale_shapes, why)


def check_bias(files: Files, tensor: str, matrix: Matrix, weight: str) -> None:
    why = f", as {weight} is {files.info(weight).shape}"
    _check(files, tensor, _BIAS_DTYPES, [(matrix.experts, matrix.rows)], why)


def check_complete(
    files: Files, prefix: str, layout: Layout, experts: range, why: str = ""
) -> None:
    """Refuse a layer that lacks tensors of these experts, naming the first.

    Takes time by the tensors that are there, however many experts are asked for.
    """
    names = set(files.names)
    numbers = range(1) if layout.fused else experts
    required = sorted(layout.required)
    wanted = (prefix + one.format(e) for e in numbers for one in required)
    first = next((one for one in wanted if one not in names), None)
    if first is None:
        return
    split = (pattern_of(name[len(prefix) :]) for name in names if name.startswith(prefix))
    there = sum(one in required and (e is None or e in numbers) for one, e in split)
    count = (numbers.stop - numbers.start) * len(required)  # past what len() takes
    whose = "" if layout.fused else f" of experts {experts.start} to {experts.stop - 1}"
    more = f" and {count - there - 1} more" if count - there > 1 else ""
    must = f"have the {count} tensors{whose} in layout {layout.name}{why}"
    fail("the checkpoint", must, f"one without {first}{more}")


@dataclass(frozen=True)
class Layer:
    """Sizes and form of a layer.

    Attributes:
        experts: in the checkpoint.
        w13, w2: the matrices of its stems.
        weight: the name of the tensor that told them.
    """

    experts: int
    w13: Matrix
    w2: Matrix
    weight: str

    @property
    def hidden(self) -> int:
        return self.w13.columns

    @property
    def inter(self) -> int:
        return self.w2.columns


def _form(files: Files, weight: str, scale: str, among: list[Matrix]) -> Matrix:
    """The form of a weight: by its dtype, and where that is not enough by its scale."""
    found = files.info(weight)
    fits = [matrix for matrix in among if found.dtype in weight_dtypes(matrix.form)]
    if not fits:
        dtypes = dict.fromkeys(name(d) for matrix in among for d in weight_dtypes(matrix.form))
        must = f"be {' or '.join(dtypes)} in layout {among[0].layout.name}"
        fail(weight, must, dtype_name(found))
    if len(fits) == 1:
        return fits[0]
    info = files.info(scale)
    for matrix in fits:
        if matrix.scale_fits(info):
            return matrix
    must = (
        f"be {', or '.join(matrix.scale_layout for matrix in fits)}, as {weight} is {found.shape}"
    )
    fail(scale, must, f"{dtype_name(info)} {info.shape}")


def describe(files: Files, prefix: str, layout: Layout, experts: int, first: int) -> Layer:
    """Sizes and form of a layer, by its expert `first`; `experts` counts those with tensors of
    their own."""
    stem = prefix + layout.w13[0].format(first)
    weight = stem + layout.weight
    info = files.info(weight)
    rank = 2 + layout.fused + layout.blocks
    if len(info.shape) != rank:
        fail(weight, f"have {rank} dimensions in layout {layout.name}", info.shape)
    stacked = info.shape[0] if layout.fused else 0
    rows, elements = info.shape[layout.fused : layout.fused + 2]
    if layout.transposed:
        rows, elements = elements, rows
    if 0 in info.shape:
        fail(weight, "have no empty dimension", info.shape)
    halves = 1 if len(layout.w13) == 2 else 2
    if rows % halves:
        fail(weight, "have as many rows of gate as of up", info.shape)
    among = []
    for form in layout.forms:
        step = Matrix(layout, form, 0, 0, halves, stacked).values_per_element
        among.append(Matrix(layout, form, rows, elements * step, halves, stacked))
    w13 = _form(files, weight, stem + (layout.scale or ""), among)
    inter = rows // halves
    w2 = Matrix(layout, w13.form, w13.columns, inter, 1, stacked)
    if inter % w2.values_per_element:
        packed = prefix + layout.w2.format(first) + layout.weight
        must = f"have an intermediate size in multiples of {w2.values_per_element}"
        fail(weight, f"{must}, of which {packed} packs its columns", inter)
    return Layer(stacked if layout.fused else experts, w13, w2, weight)
