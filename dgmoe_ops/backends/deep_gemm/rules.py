"""What the library takes, by architecture: layouts of scales, granularities, sizes. One table."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats.layout import Layout
from ...formats.layouts import CONTIG_ALIGNMENT, TILE_ROWS, ScaleLayout
from ...formats.recipes import Granularity
from ..request import Request, check_addresses, refuse
from ..scales import check_scale, with_strides_of


@dataclass(frozen=True)
class ArchRule:
    """What DeepGEMM takes on an architecture.

    Attributes:
        name: for people to read.
        a_scale, b_scale: the layouts of the scales of activations and weights.
        granularities: legal pairs of those of activations and weights.
        default: the pair that is meant where a call names none, and that the library assumes too.
        masked: whether there are masked kernels.
        alignments: rows to which segments of the contiguous layout may be padded.
        powers_of_two: whether the tensor core takes scales as exponents.
        fp4: whether weights may be e2m1 codes, two a byte.
    """

    name: str
    a_scale: ScaleLayout
    b_scale: ScaleLayout
    granularities: frozenset[tuple[Granularity, Granularity]]
    default: tuple[Granularity, Granularity]
    masked: bool
    alignments: tuple[int, ...]
    powers_of_two: bool
    fp4: bool


_ROW: Granularity = (1, 128)
_BLOCK: Granularity = (128, 128)
_MX_GRANULARITIES = frozenset(
    ((1, a_columns), (1, b_columns)) for a_columns in (32, 128) for b_columns in (32, 128)
)

#: by compute capability major
RULES: dict[int, ArchRule] = {
    9: ArchRule(
        "SM90",
        ScaleLayout.MN_MAJOR,
        ScaleLayout.ROW_MAJOR,
        frozenset({(_ROW, _BLOCK)}),
        (_ROW, _BLOCK),
        masked=True,
        alignments=(128,),
        powers_of_two=False,
        fp4=False,
    ),
    10: ArchRule(
        "SM100",
        ScaleLayout.PACKED_UE8M0,
        ScaleLayout.PACKED_UE8M0,
        _MX_GRANULARITIES,
        (_ROW, _ROW),
        masked=True,
        alignments=(32, 64, 96, 128),
        powers_of_two=True,
        fp4=True,
    ),
    12: ArchRule(
        "SM120",
        ScaleLayout.PACKED_UE8M0,
        ScaleLayout.PACKED_UE8M0,
        _MX_GRANULARITIES,
        (_ROW, _ROW),
        masked=False,
        alignments=(32, 64, 128),
        powers_of_two=True,
        fp4=True,
    ),
}

_K_MULTIPLE = {1: 16, 2: 64}  # by bytes of a value: fp8 rows on 16 bytes, bf16 in whole blocks
_FP4_K_MULTIPLE = 128  # of values, which a tensor map unpacks 128 at a time


def _text(pair: tuple[Granularity, Granularity]) -> str:
    return f"{pair[0]} and {pair[1]}"


def rule_of(arch_major: int) -> ArchRule | None:
    """Look up the rule of an architecture; None where the library has no kernels."""
    return RULES.get(arch_major)


def check_scales(request: Request, arch_major: int) -> tuple[Request, dict[str, Granularity]]:
    """Check the layouts and granularities of scales that this architecture takes.

    Returns the request with the strides that TMA wants, and the recipe keywords to pass on.

    Raises:
        ValueError: a scale has another layout, or a granularity or the op does not run there.
    """
    op, spec = request.op, request.spec
    rule = rule_of(arch_major)
    if rule is None:
        names = " or ".join(rule.name for rule in RULES.values())
        raise refuse(op, "a", f"be on an {names} device", f"SM{arch_major}0")
    if spec.masked and not rule.masked:
        must = f"be contiguous segments on {rule.name}, which has no masked kernels"
        raise refuse(op, "a", must, "a masked slab")
    a_scale, b_scale = request.operands.a_scale, request.operands.b_scale
    if a_scale is None or b_scale is None:
        return request, {}
    if spec.fp4 and not rule.fp4:
        must = f"be float8_e4m3fn on {rule.name}, for which DeepGEMM has no FP4 kernels"
        raise refuse(op, "b", must, "int8, two e2m1 codes a byte")
    given = spec.granularity_a is not None
    pair = (spec.granularity_a, spec.granularity_b) if given else rule.default
    if pair not in rule.granularities:
        if len(rule.granularities) == 1:
            [legal] = rule.granularities
            must = f"be {_text(legal)} on {rule.name}"
        else:
            must = f"have one scale a row and 32 or 128 columns on {rule.name}"
        raise refuse(op, "recipe_a and recipe_b", must, _text(pair))
    a_scale = with_strides_of(a_scale, rule.a_scale)
    b_scale = with_strides_of(b_scale, rule.b_scale)
    check_scale(op, "a_scale", a_scale, rule.a_scale, rule.name)
    check_scale(op, "b_scale", b_scale, rule.b_scale, rule.name)
    request = request.with_operands(a_scale=a_scale, b_scale=b_scale)
    # The library's own default is the rule's.
    if not given or pair == rule.default and not rule.powers_of_two:
        return request, {}
    return request, {"recipe_a": pair[0], "recipe_b": pair[1]}


def check_sizes(request: Request, alignment: int = CONTIG_ALIGNMENT) -> None:
    """Check what the library's tiles and tensor maps need; `alignment` is that of the segments.

    Raises:
        ValueError: a size does not fit. The library would trap on the device, or write over the
            next expert's rows.
    """
    op, spec = request.op, request.spec
    m, n, k = spec.m, spec.n, spec.k
    check_addresses(request)
    if op == "tf32_hc_prenorm_gemm":
        check_prenorm_sizes(request)
        return
    multiple = _K_MULTIPLE[request.operands.a.element_size()]
    if spec.fp4 and k % _FP4_K_MULTIPLE:
        must = f"be a multiple of {_FP4_K_MULTIPLE} for int8 b, FP4, on CUDA"
        raise refuse(op, "k", must, k)
    if k % multiple:
        raise refuse(op, "k", f"be a multiple of {multiple} on CUDA", k)
    if n % 8:
        raise refuse(op, "n", "be a multiple of 8 on CUDA", n)
    if spec.masked and spec.experts > 1 and m % TILE_ROWS:
        # Whole tiles are stored; the last one of an expert must not reach into the next expert.
        raise refuse(op, "a", f"have a multiple of {TILE_ROWS} rows an expert on CUDA", m)
    if spec.layout is Layout.CONTIG and m % alignment:
        # The expert of each half tile is read from m_indices, also in the last tile.
        raise refuse(op, "a", f"have a multiple of {alignment} rows on CUDA", m)


def check_prenorm_sizes(request: Request) -> None:
    """Check the sizes that the kernel of tf32_hc_prenorm_gemm is written for."""
    op, spec = request.op, request.spec
    if spec.n > 32 or spec.n % 8:
        raise refuse(op, "fn", "have at most 32 rows, a multiple of 8, on CUDA", spec.n)
    if spec.k % 64:
        raise refuse(op, "x", "have a multiple of 64 columns on CUDA", spec.k)
    splits = request.num_splits or 1
    if splits > spec.k // 64:
        must = f"be at most k / 64 = {spec.k // 64} on CUDA, a block a piece"
        raise refuse(op, "num_splits", must, splits)
