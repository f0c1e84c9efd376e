"""What the library takes, by architecture: forms of scales, recipes, sizes. One table.

Checked here because the library would copy or convert other scales on every call, padding rows
included, fail without naming anything, or trap on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from ...formats.layouts import CONTIG_ALIGNMENT, TILE_ROWS, TMA_ELEMENTS, round_up
from ..request import Request, refuse


class Form(IntEnum):
    """The form of a scale tensor, as the C++ side numbers it too."""

    NONE = 0
    FP32_MN_MAJOR = 1  #: float32, columns contiguous and on 16 bytes, as TMA reads them
    FP32_PLAIN = 2  #: float32, contiguous, unpadded
    PACKED_MN_MAJOR = 3  #: int32, four UE8M0 bytes, columns contiguous and on 16 bytes


_HELPERS = {
    Form.FP32_MN_MAJOR: " (dgmoe_ops.ops.align_scale makes it so)",
    Form.FP32_PLAIN: ", one scale a 128x128 block",
    Form.PACKED_MN_MAJOR: " (dgmoe_ops.ops.pack_ue8m0 makes it so)",
}
_MUST = {
    Form.FP32_MN_MAJOR: "be MN-major and TMA-aligned",
    Form.FP32_PLAIN: "be contiguous float32",
    Form.PACKED_MN_MAJOR: "be packed UE8M0 int32, MN-major,",
}
_DTYPES = {
    Form.FP32_MN_MAJOR: torch.float32,
    Form.FP32_PLAIN: torch.float32,
    Form.PACKED_MN_MAJOR: torch.int32,
}
Recipe = tuple[int, int]


@dataclass(frozen=True)
class ArchRule:
    """What DeepGEMM takes on an architecture.

    Attributes:
        name: for people to read.
        a_scale, b_scale: the forms of the scales of activations and weights.
        recipes: legal pairs (recipe_a, recipe_b), each (rows, columns) that one scale covers.
        default: the pair that is meant where a call names none, and that the library assumes too.
        masked: whether there are masked kernels.
        alignments: rows to which segments of the contiguous layout may be padded.
        powers_of_two: whether the tensor core takes scales as exponents.
        fp4: whether weights may be e2m1 codes, two a byte.
    """

    name: str
    a_scale: Form
    b_scale: Form
    recipes: frozenset[tuple[Recipe, Recipe]]
    default: tuple[Recipe, Recipe]
    masked: bool
    alignments: tuple[int, ...]
    powers_of_two: bool
    fp4: bool


_MX_RECIPES = frozenset(
    ((1, a_columns), (1, b_columns)) for a_columns in (32, 128) for b_columns in (32, 128)
)

#: by compute capability major
RULES: dict[int, ArchRule] = {
    9: ArchRule(
        "SM90",
        Form.FP32_MN_MAJOR,
        Form.FP32_PLAIN,
        frozenset({((1, 128), (128, 128))}),
        ((1, 128), (128, 128)),
        masked=True,
        alignments=(128,),
        powers_of_two=False,
        fp4=False,
    ),
    10: ArchRule(
        "SM100",
        Form.PACKED_MN_MAJOR,
        Form.PACKED_MN_MAJOR,
        _MX_RECIPES,
        ((1, 128), (1, 128)),
        masked=True,
        alignments=(32, 64, 96, 128),
        powers_of_two=True,
        fp4=True,
    ),
    12: ArchRule(
        "SM120",
        Form.PACKED_MN_MAJOR,
        Form.PACKED_MN_MAJOR,
        _MX_RECIPES,
        ((1, 128), (1, 128)),
        masked=False,
        alignments=(32, 64, 128),
        powers_of_two=True,
        fp4=True,
    ),
}

_K_MULTIPLE = {1: 16, 2: 64}  # by bytes of a value: fp8 rows on 16 bytes, bf16 in whole blocks
_FP4_K_MULTIPLE = 128  # of values, which a tensor map unpacks 128 at a time


def rule_of(arch_major: int) -> ArchRule | None:
    """Look up the rule of an architecture; None where the library has no kernels."""
    return RULES.get(arch_major)


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


def with_tma_strides(scale: torch.Tensor) -> torch.Tensor:
    """View scales of one column or of one expert with the strides that TMA wants.

    The stride of a size-1 dimension is lost in copies and conversions, and the library insists.
    """
    *batch, rows, columns = scale.shape
    if rows % TMA_ELEMENTS or (rows != 1 and scale.stride(-2) != 1):
        return scale
    if columns != 1 and scale.stride(-1) != rows:
        return scale
    if batch and batch[0] != 1 and scale.stride(0) != rows * columns:
        return scale
    strides = (*[rows * columns] * len(batch), 1, rows)
    return scale if scale.stride() == strides else scale.as_strided(scale.shape, strides)


def has_form(scale: torch.Tensor, form: Form) -> bool:
    """Tell whether a scale tensor has a form."""
    if scale.dtype != _DTYPES[form]:
        return False
    return scale.is_contiguous() if form == Form.FP32_PLAIN else is_mn_major(scale)


def check_scale(op: str, arg: str, scale: torch.Tensor, form: Form, arch: str) -> None:
    """Check the form of one scale tensor.

    Raises:
        ValueError: it has another one; the message says what makes it right.
    """
    got = scale_layout_text(scale)
    if form == Form.FP32_MN_MAJOR and scale.dtype != torch.float32:
        raise refuse(op, arg, f"be float32 on {arch}", got)
    if not has_form(scale, form):
        where = f" on {arch}" if form != Form.FP32_PLAIN else ""
        tail = f", on {arch}" if form == Form.FP32_PLAIN else ""
        raise refuse(op, arg, f"{_MUST[form]}{where}{_HELPERS[form]}{tail}", got)


def check_scales(request: Request, arch_major: int) -> tuple[Request, dict[str, Recipe]]:
    """Check the forms and recipes that this architecture takes.

    Returns the request with the strides that TMA wants, and the recipe keywords to pass on.

    Raises:
        ValueError: a scale has another form, or a recipe or the op does not run there.
    """
    op = request.op
    rule = rule_of(arch_major)
    if rule is None:
        names = " or ".join(rule.name for rule in RULES.values())
        raise refuse(op, "a", f"be on an {names} device", f"SM{arch_major}0")
    if request.masked and not rule.masked:
        must = f"be contiguous segments on {rule.name}, which has no masked kernels"
        raise refuse(op, "a", must, "a masked slab")
    if request.a_scale is None or request.b_scale is None:
        return request, {}
    if request.fp4 and not rule.fp4:
        must = f"be float8_e4m3fn on {rule.name}, for which DeepGEMM has no FP4 kernels"
        raise refuse(op, "b", must, "int8, two e2m1 codes a byte")
    given = request.recipe_a is not None
    recipes = (request.recipe_a, request.recipe_b) if given else rule.default
    if recipes not in rule.recipes:
        if len(rule.recipes) == 1:
            [(legal_a, legal_b)] = rule.recipes
            must = f"be {legal_a} and {legal_b} on {rule.name}"
        else:
            must = f"have one scale a row and 32 or 128 columns on {rule.name}"
        raise refuse(op, "recipe_a and recipe_b", must, f"{recipes[0]} and {recipes[1]}")
    a_scale = request.a_scale
    b_scale = request.b_scale
    if rule.a_scale != Form.FP32_PLAIN:
        a_scale = with_tma_strides(a_scale)
    if rule.b_scale != Form.FP32_PLAIN:
        b_scale = with_tma_strides(b_scale)
    check_scale(op, "a_scale", a_scale, rule.a_scale, rule.name)
    check_scale(op, "b_scale", b_scale, rule.b_scale, rule.name)
    request = request._replace(a_scale=a_scale, b_scale=b_scale)
    # The library's own default is the rule's.
    if not given or recipes == rule.default and not rule.powers_of_two:
        return request, {}
    return request, {"recipe_a": recipes[0], "recipe_b": recipes[1]}


def check_sizes(request: Request, alignment: int = CONTIG_ALIGNMENT) -> None:
    """Check what the library's tiles and tensor maps need; `alignment` is that of the segments.

    Raises:
        ValueError: a size does not fit. The library would trap on the device, or write over the
            next expert's rows.
    """
    op, m, n, k = request.op, request.m, request.n, request.k
    for name, tensor in (("a", request.a), ("b", request.b), ("out", request.d)):
        if tensor.data_ptr() % 16:
            raise refuse(op, name, "start on 16 bytes on CUDA", "another address")
    if op == "tf32_hc_prenorm_gemm":
        check_prenorm_sizes(request)
        return
    multiple = _K_MULTIPLE[request.a.element_size()]
    if request.fp4 and k % _FP4_K_MULTIPLE:
        must = f"be a multiple of {_FP4_K_MULTIPLE} for int8 b, FP4, on CUDA"
        raise refuse(op, "k", must, k)
    if k % multiple:
        raise refuse(op, "k", f"be a multiple of {multiple} on CUDA", k)
    if n % 8:
        raise refuse(op, "n", "be a multiple of 8 on CUDA", n)
    if request.masked and request.experts > 1 and m % TILE_ROWS:
        # Whole tiles are stored; the last one of an expert must not reach into the next expert.
        raise refuse(op, "a", f"have a multiple of {TILE_ROWS} rows an expert on CUDA", m)
    if request.grouped and not request.masked and m % alignment:
        # The expert of each half tile is read from m_indices, also in the last tile.
        raise refuse(op, "a", f"have a multiple of {alignment} rows on CUDA", m)


def check_prenorm_sizes(request: Request) -> None:
    """Check the sizes that the kernel of tf32_hc_prenorm_gemm is written for."""
    op = request.op
    if request.n > 32 or request.n % 8:
        raise refuse(op, "fn", "have at most 32 rows, a multiple of 8, on CUDA", request.n)
    if request.k % 64:
        raise refuse(op, "x", "have a multiple of 64 columns on CUDA", request.k)
    splits = request.num_splits or 1
    if splits > request.k // 64:
        must = f"be at most k / 64 = {request.k // 64} on CUDA, a block a piece"
        raise refuse(op, "num_splits", must, splits)
