"""Weight preparation: expert weights as a checkpoint has them to what the layer reads, once, at
load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from .. import _progress
from .._sanity import first_where
from ..formats.layouts import MX_GROUP, ScaleLayout, round_up, scale_sizes_and_strides
from ..formats.recipes import FP8_BLOCK, RECIPES, TARGETS, Recipe
from ..formats.weights import WeightFormat, formats_of, name, refuse_weight, values_per_element
from .convert import Goal, Source, Stacked, convert, halves_of

_OUT_MULTIPLE = 8  # 16 bytes of bf16: the least row that a GEMM can store in one piece
_BIAS_DTYPES = (torch.float32, torch.bfloat16)
GATE_UP_INTERLEAVES = (0, 1, 8)


@dataclass(frozen=True, eq=False)
class MoEWeights:
    """Prepared weights of one layer, in the argument order of `fused_moe`.

    Attributes:
        w13: (experts, 2 * intermediate, hidden), padded.
        w13_scale: scales of w13, or None.
        w2: (experts, hidden, intermediate), padded.
        w2_scale: scales of w2, or None.
        recipe: name of the recipe.
        target: what they were prepared for.
        hidden_size, intermediate_size: the sizes before padding.
        w13_bias: (experts, 2 * intermediate) biases of GEMM1, padded, or None.
        w2_bias: (experts, hidden) biases of GEMM2, or None.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    recipe: str
    target: str
    hidden_size: int
    intermediate_size: int
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    @property
    def tensors(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """w13, w13_scale, w2, w2_scale: `fused_moe(x, weights, ids, *prepared.tensors,
        recipe=prepared.recipe)`."""
        return self.w13, self.w13_scale, self.w2, self.w2_scale

    @property
    def biases(self) -> dict[str, torch.Tensor]:
        """The biases that there are, as keywords of `fused_moe`."""
        both = {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        return {name: bias for name, bias in both.items() if bias is not None}

    @property
    def nbytes(self) -> int:
        held = (*self.tensors, *self.biases.values())
        return sum(t.numel() * t.element_size() for t in held if t is not None)


def padded_sizes(recipe: Recipe, hidden: int, inter: int) -> tuple[int, int, int]:
    """Columns of w13, rows of w2 and columns of w2 after padding; w13 has twice as many rows as w2
    has columns."""
    return (
        round_up(hidden, recipe.k_multiple),
        round_up(hidden, _OUT_MULTIPLE),
        round_up(inter, recipe.k_multiple),
    )


def _fail(arg: str, must: str, got, where: str = "prepare_weights") -> NoReturn:
    raise ValueError(f"dgmoe_ops.{where}: {arg} must {must}, got {got}")


def _forms(
    recipe: Recipe, weights: dict[str, tuple[torch.Tensor, torch.Tensor | None, int]]
) -> list[WeightFormat]:
    forms = []
    for arg, (weight, scale, halves) in weights.items():
        found = formats_of(weight, scale, halves, recipe.sources)
        if not found:
            where = "dgmoe_ops.prepare_weights"
            refuse_weight(where, arg, weight, scale, halves, recipe.sources)
        forms.append(found[0])
    return forms


def check_recipe(where: str, recipe: str, target: str) -> Recipe:
    """The recipe of a name, where it can be prepared for the target."""
    if recipe not in RECIPES:
        _fail("recipe", f"be one of {', '.join(RECIPES)}", repr(recipe), where)
    if target not in TARGETS:
        _fail("target", f"be one of {', '.join(TARGETS)}", repr(target), where)
    chosen = RECIPES[recipe]
    if target not in chosen.targets:
        must = f"be one of {', '.join(chosen.targets)} for recipe {recipe}"
        _fail("target", must, repr(target), where)
    return chosen


def _check(
    w13, w13_scale, w2, w2_scale, recipe: str, target: str
) -> tuple[Recipe, list[WeightFormat]]:
    """Check all arguments but the values of scales; return the recipe and the forms of w13, w2."""
    chosen = check_recipe("prepare_weights", recipe, target)
    for arg, weight in (("w13", w13), ("w2", w2)):
        if weight.dim() != 3:
            _fail(arg, "have three dimensions, experts first", tuple(weight.shape))
    experts, rows, _ = w13.shape
    if rows % 2:
        _fail("w13", "have an even number of rows, gate and up", tuple(w13.shape))
    for arg, tensor in (("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale)):
        if tensor is not None and tensor.device != w13.device:
            _fail(arg, f"be on the device of w13 ({w13.device})", tensor.device)
    hidden, inter = w13.shape[2] * values_per_element(w13), rows // 2
    shape = (experts, hidden, inter)
    if (w2.shape[0], w2.shape[1], w2.shape[2] * values_per_element(w2)) != shape:
        packed = values_per_element(w2) == 2
        wanted = (experts, hidden, inter // 2) if packed else shape
        _fail("w2", f"have shape {wanted}, as w13 is {tuple(w13.shape)}", tuple(w2.shape))
    weights = {"w13": (w13, w13_scale, 2), "w2": (w2, w2_scale, 1)}
    return chosen, _forms(chosen, weights)


def _prepared(w13, w13_scale, w2, w2_scale, chosen: Recipe, target: str) -> bool:
    """Whether the scales are packed already, as this function makes them; such weights must fit."""
    packed = [s is not None and s.dtype == torch.int32 for s in (w13_scale, w2_scale)]
    if not any(packed):
        return False
    form = chosen.weight_scale_layout(target)
    for arg, weight, scale, is_packed in (
        ("w13", w13, w13_scale, packed[0]),
        ("w2", w2, w2_scale, packed[1]),
    ):
        if not is_packed:
            got = "no tensor" if scale is None else str(scale.dtype)
            _fail(f"{arg}_scale", "be packed UE8M0 int32, as the other scale is", got)
        if form != "packed_ue8m0" or weight.dtype != chosen.weight_dtype:
            _fail(
                arg,
                f"be prepared for recipe {chosen.name} and target {target} ({form} scales)",
                "weights with packed UE8M0 int32 scales, which other targets read",
            )
        columns = weight.shape[2] * chosen.values_per_element
        if columns % chosen.k_multiple:
            must = (
                f"have columns padded to a multiple of {chosen.k_multiple}, as its scale is packed"
            )
            _fail(arg, must, tuple(weight.shape))
        groups = columns // chosen.group_size if chosen is FP8_BLOCK else columns // MX_GROUP
        _, strides = scale_sizes_and_strides(*scale.shape[:2], groups, ScaleLayout.PACKED_UE8M0)
        if scale.stride() != strides:
            _fail(f"{arg}_scale", f"have strides {strides}, MN-major", scale.stride())
        _check_words(arg, scale)
    return True


def _check_words(arg: str, scale: torch.Tensor) -> None:
    """Refuse packed exponents of NaN, an expert at a time."""
    if scale.device.type == "meta":
        return
    for expert, words in enumerate(scale):
        wrong = torch.zeros(words.shape, dtype=torch.bool, device=words.device)
        for shift in (0, 8, 16, 24):
            wrong |= (words >> shift & 255) == 255
        if wrong.any():
            index = [expert, *first_where(wrong)]
            _fail(f"{arg}_scale", "hold no exponent byte 255 (NaN)", f"one in the word at {index}")


def _check_gate_up_interleave(
    gate_up_interleave: int, form: WeightFormat, inter: int, packed: bool
) -> None:
    if gate_up_interleave not in GATE_UP_INTERLEAVES:
        _fail(
            "gate_up_interleave",
            f"be one of {', '.join(map(str, GATE_UP_INTERLEAVES))}",
            gate_up_interleave,
        )
    if not gate_up_interleave:
        return
    if packed:
        _fail(
            "gate_up_interleave",
            "be 0 for prepared weights, which have gate and up in halves",
            gate_up_interleave,
        )
    if form is WeightFormat.FP8_BLOCK:
        # A block's scale is of 64 gate and 64 up rows; in halves it would be of 128 rows of two
        # blocks, and only requantising could give them one scale.
        must = "be 0 for FP8 with a scale a 128x128 block: its blocks would mix gate and up"
        _fail("gate_up_interleave", f"{must} (dequantise first)", gate_up_interleave)
    if inter % gate_up_interleave:
        _fail(
            "w13",
            f"have rows of gate and up in whole chunks of {gate_up_interleave}",
            f"{inter} of each",
        )


def _check_bias(arg: str, bias: torch.Tensor | None, shape: tuple[int, int], like) -> None:
    if bias is None:
        return
    if bias.dtype not in _BIAS_DTYPES:
        _fail(arg, "be float32 or bfloat16", name(bias.dtype))
    if tuple(bias.shape) != shape:
        _fail(arg, f"have shape {shape}", tuple(bias.shape))
    if bias.device != like.device:
        _fail(arg, f"be on the device of w13 ({like.device})", bias.device)


def pad_w13_bias(
    bias: torch.Tensor | None, rows: int, gate_up_interleave: int
) -> torch.Tensor | None:
    """(experts, 2 * intermediate) biases to halves of `rows` each, padded with zeros."""
    if bias is None:
        return None
    gate, up = halves_of(bias.t(), 2, gate_up_interleave)
    if not gate_up_interleave and gate.shape[0] == rows:
        return bias.contiguous()
    out = bias.new_zeros((bias.shape[0], 2, rows))
    out[:, 0, : gate.shape[0]] = gate.t()
    out[:, 1, : up.shape[0]] = up.t()
    return out.flatten(1)


def prepare_sources(
    source13: Source,
    source2: Source,
    chosen: Recipe,
    target: str,
    sizes: tuple[int, int],
    advance: Callable[[], object],
    *,
    search: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    gate_up_interleave: int = 0,
) -> MoEWeights:
    """Prepare weights that are read an expert at a time, after all checks.

    Args:
        source13, source2: what reads w13 and w2.
        chosen, target: recipe and target, which take the forms of the sources.
        sizes: hidden and intermediate size.
        advance: called once for every expert of each source.
        search: choose FP4 exponents by least squared error.
        w13_bias, w2_bias: biases of all experts.
        gate_up_interleave: how the columns of w13_bias stand.
    """
    hidden, inter = sizes
    packed = chosen.weight_scale_layout(target) == "packed_ue8m0"
    padded_hidden, padded_out, padded_inter = padded_sizes(chosen, hidden, inter)
    goal13 = Goal(chosen, packed, 2, padded_inter, padded_hidden, search)
    goal2 = Goal(chosen, packed, 1, padded_out, padded_inter, search)
    w13, w13_scale = convert(goal13, source13, advance)
    w2, w2_scale = convert(goal2, source2, advance)
    w13_bias = pad_w13_bias(w13_bias, padded_inter, gate_up_interleave)
    w2_bias = None if w2_bias is None else w2_bias.contiguous()
    tensors = (w13, w13_scale, w2, w2_scale)
    return MoEWeights(*tensors, chosen.name, target, hidden, inter, w13_bias, w2_bias)


def prepare_weights(
    w13: torch.Tensor | MoEWeights,
    w13_scale: torch.Tensor | None = None,
    w2: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    recipe: str = "fp8_block",
    target: str = "cpu",
    *,
    search: bool = False,
    progress: bool = True,
    gate_up_interleave: int = 0,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> MoEWeights:
    """Prepare the expert weights of one layer: pad, quantise, and lay out the scales for a target.

    - bf16: from floats. No scales.
    - fp8_block: from floats, FP8 with a scale a 128x128 block or a tensor, and MXFP4, exactly where
      the group scales of a block spread by at most 2^14. Scales are fp32 blocks on cpu and sm90; on
      sm100 and sm120 packed UE8M0 a row, blocks that are no power of two requantised.
    - mxfp8: from floats, and FP8 with a UE8M0 scale a row and 32 columns. Packed UE8M0; not on
      sm120.
    - mxfp4: from floats and MXFP4. Packed UE8M0.

    Args:
        w13: (experts, 2 * intermediate, hidden) gate rows, then up rows: bfloat16, float32 or
            float8_e4m3fn; or (experts, 2 * intermediate, hidden / 2) int8 or uint8, two e2m1 codes
            a byte, the low nibble being the even column. Prepared `MoEWeights` come back unchanged
            where recipe and target agree.
        w13_scale: for quantised w13. A 128x128 block: (experts, 2 * ceil(intermediate / 128),
            ceil(hidden / 128)). A tensor: float32 (), (experts,), (experts, 1), or (experts, 2) for
            gate and up. UE8M0: (experts, 2 * intermediate, ceil(hidden / 32)). All but the second
            float32, or exponent bytes as uint8 or float8_e8m0fnu.
        w2: (experts, hidden, intermediate), as w13.
        w2_scale: as w13_scale.
        recipe: "bf16", "fp8_block", "mxfp8" or "mxfp4".
        target: "cpu", "sm90", "sm100" or "sm120".
        search: choose the exponents of floats to mxfp4 by least squared error.
        progress: show a bar where stderr is a terminal.
        gate_up_interleave: the order of the rows of w13 (and of its scales, if a row has them, and
            w13_bias): 0, all of gate and all of up; 8, eight of each in turn; 1, one of each in
            turn. They come out in halves, for `fused_moe` with gate_up_interleave 0. Not for
            128x128 blocks, which would mix gate and up.
        w13_bias: (experts, 2 * intermediate) float32 or bfloat16, rows as in w13.
        w2_bias: (experts, hidden) float32 or bfloat16.

    Returns:
        `MoEWeights`. Sizes are padded to the recipe's multiple with zeros, which contribute
        nothing. What needs neither padding nor conversion is shared with the arguments, not copied.
        Experts are converted one at a time: beyond the result it takes the memory of one.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or value, weights were prepared for
            another target, or a scale is none: NaN (byte 255), infinite, zero, negative, or no
            power of two where the form has UE8M0 scales. Byte 0 is one, 2^-127. The message names
            the tensor and the first index.
    """
    if isinstance(w13, MoEWeights):
        if (w13.recipe, w13.target) != (recipe, target):
            _fail(
                "w13",
                f"be prepared for recipe {recipe} and target {target}",
                f"{w13.recipe}, {w13.target}",
            )
        return w13
    if w2 is None:
        _fail("w2", "be given", None)
    chosen, (form13, form2) = _check(w13, w13_scale, w2, w2_scale, recipe, target)
    w13, w13_scale, w2, w2_scale, w13_bias, w2_bias = (
        tensor if tensor is None else tensor.detach()
        for tensor in (w13, w13_scale, w2, w2_scale, w13_bias, w2_bias)
    )
    hidden, inter = w13.shape[2] * values_per_element(w13), w13.shape[1] // 2
    _check_bias("w13_bias", w13_bias, (w13.shape[0], 2 * inter), w13)
    _check_bias("w2_bias", w2_bias, (w13.shape[0], hidden), w13)
    prepared = _prepared(w13, w13_scale, w2, w2_scale, chosen, target)
    _check_gate_up_interleave(gate_up_interleave, form13, inter, prepared)
    if prepared:
        tensors = (w13, w13_scale, w2, w2_scale)
        return MoEWeights(*tensors, recipe, target, hidden, inter, w13_bias, w2_bias)
    source13 = Stacked("w13", form13, w13, w13_scale, 2, gate_up_interleave)
    source2 = Stacked("w2", form2, w2, w2_scale, 1)
    with _progress.steps(2 * w13.shape[0], f"preparing experts as {recipe}", progress) as advance:
        return prepare_sources(
            source13,
            source2,
            chosen,
            target,
            (hidden, inter),
            advance,
            search=search,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            gate_up_interleave=gate_up_interleave,
        )
