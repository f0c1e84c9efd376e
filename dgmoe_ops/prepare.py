"""Weight preparation: expert weights as a checkpoint has them to what the layer reads, once, at
load."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layouts import WEIGHT_BLOCK, ceil_div, round_up
from .ops.scale import pack_ue8m0
from .ops.weights import quant_block_fp8
from .recipes import RECIPES, Recipe

TARGETS = ("cpu", "sm90", "sm100", "sm120")
_OUT_MULTIPLE = 8  # 16 bytes of bf16: the least row that a GEMM can store in one piece


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
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    recipe: str
    target: str
    hidden_size: int
    intermediate_size: int

    @property
    def tensors(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """w13, w13_scale, w2, w2_scale: `fused_moe(x, weights, ids, *prepared.tensors,
        recipe=prepared.recipe)`."""
        return self.w13, self.w13_scale, self.w2, self.w2_scale

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors if t is not None)


def padded_sizes(recipe: Recipe, hidden: int, inter: int) -> tuple[int, int, int]:
    """Columns of w13, rows of w2 and columns of w2 after padding; w13 has twice as many rows as w2
    has columns."""
    return (
        round_up(hidden, recipe.k_multiple),
        round_up(hidden, _OUT_MULTIPLE),
        round_up(inter, recipe.k_multiple),
    )


def _fail(arg: str, must: str, got) -> None:
    raise ValueError(f"dgmoe_ops.prepare_weights: {arg} must {must}, got {got}")


def _pad(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zero-pad the last two dimensions. fp8 zeros are zero bytes, so the bytes are padded."""
    extra = (0, columns - weight.shape[-1], 0, rows - weight.shape[-2])
    if not any(extra):
        return weight.contiguous()
    if weight.dtype == torch.float8_e4m3fn:
        padded = torch.nn.functional.pad(weight.view(torch.uint8), extra)
        return padded.view(torch.float8_e4m3fn)
    return torch.nn.functional.pad(weight, extra)


def _dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One expert's fp8 weight (n, k) and block scales to fp32."""
    n, k = weight.shape
    blocks = scale.repeat_interleave(WEIGHT_BLOCK, 0)[:n].repeat_interleave(WEIGHT_BLOCK, 1)[:, :k]
    return weight.float() * blocks


def _requantize(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 weights to fp8 weights whose block scales are powers of two, an expert at a time to bound
    the memory."""
    q, blocks = torch.empty_like(weight), torch.empty_like(scale)
    for e in range(weight.shape[0]):
        q[e], blocks[e] = quant_block_fp8(_dequantize(weight[e], scale[e]), True)
    return q, blocks


def _quantize(
    weight: torch.Tensor, scale: torch.Tensor | None, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, n, k) weights to e4m3 and the target's scales: fp32 blocks, or packed UE8M0 a
    row."""
    if scale is None:
        q, blocks = quant_block_fp8(weight, packed)
    elif packed:
        q, blocks = _requantize(weight, scale)
    else:
        q, blocks = weight, scale.contiguous()
    if packed:
        blocks = pack_ue8m0(blocks.repeat_interleave(WEIGHT_BLOCK, 1)[:, : weight.shape[1]])
    return q, blocks


def _check(w13, w13_scale, w2, w2_scale, recipe: str, target: str) -> Recipe:
    if recipe not in RECIPES:
        _fail("recipe", f"be one of {', '.join(RECIPES)}", repr(recipe))
    if target not in TARGETS:
        _fail("target", f"be one of {', '.join(TARGETS)}", repr(target))
    chosen = RECIPES[recipe]
    for arg, weight in (("w13", w13), ("w2", w2)):
        if weight.dim() != 3:
            _fail(arg, "have three dimensions, experts first", tuple(weight.shape))
    experts, rows, hidden = w13.shape
    if rows % 2:
        _fail("w13", "have an even number of rows, gate and up", tuple(w13.shape))
    inter = rows // 2
    if tuple(w2.shape) != (experts, hidden, inter):
        _fail("w2", f"have shape {(experts, hidden, inter)}", tuple(w2.shape))
    for arg, tensor in (("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale)):
        if tensor is not None and tensor.device != w13.device:
            _fail(arg, f"be on the device of w13 ({w13.device})", tensor.device)
    for arg, weight, scale, shape in (
        (
            "w13",
            w13,
            w13_scale,
            (experts, 2 * ceil_div(inter, WEIGHT_BLOCK), ceil_div(hidden, WEIGHT_BLOCK)),
        ),
        (
            "w2",
            w2,
            w2_scale,
            (experts, ceil_div(hidden, WEIGHT_BLOCK), ceil_div(inter, WEIGHT_BLOCK)),
        ),
    ):
        fp8 = weight.dtype == torch.float8_e4m3fn
        allowed = (torch.bfloat16, torch.float32) + (
            (torch.float8_e4m3fn,) if chosen.quantized else ()
        )
        if weight.dtype not in allowed:
            _fail(arg, f"be one of {allowed}", weight.dtype)
        if (scale is not None) != fp8:
            _fail(
                f"{arg}_scale",
                f"be given for float8_e4m3fn {arg} and only for it",
                scale if scale is None else "a tensor",
            )
        if scale is not None and (scale.dtype != torch.float32 or tuple(scale.shape) != shape):
            _fail(
                f"{arg}_scale",
                f"be float32 of shape {shape}",
                f"{scale.dtype} {tuple(scale.shape)}",
            )
    return chosen


def prepare_weights(
    w13: torch.Tensor | MoEWeights,
    w13_scale: torch.Tensor | None = None,
    w2: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    recipe: str = "fp8_block",
    target: str = "cpu",
) -> MoEWeights:
    """Prepare the expert weights of one layer: pad, quantise, and lay out the scales for a target.

    Args:
        w13: (experts, 2 * intermediate, hidden) gate rows, then up rows: bfloat16 or float32, or
            float8_e4m3fn with scales for fp8_block. Prepared `MoEWeights` come back unchanged where
            recipe and target agree.
        w13_scale: (experts, 2 * ceil(intermediate / 128), ceil(hidden / 128)) float32 for
            float8_e4m3fn weights.
        w2: (experts, hidden, intermediate), as w13.
        w2_scale: (experts, ceil(hidden / 128), ceil(intermediate / 128)) float32 for float8_e4m3fn
            weights.
        recipe: "bf16" or "fp8_block".
        target: "cpu", "sm90" (both keep fp32 block scales), "sm100" or "sm120" (power-of-two scales
            by requantising, packed UE8M0).

    Returns:
        `MoEWeights`. Sizes are padded to the recipe's multiple with zeros, which contribute
        nothing. What needs neither padding nor conversion is shared with the arguments, not copied.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or value, or weights were prepared
            for another target.
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
    chosen = _check(w13, w13_scale, w2, w2_scale, recipe, target)
    w13, w2 = w13.detach(), w2.detach()
    experts, rows, hidden = w13.shape
    inter = rows // 2
    padded_hidden, padded_out, padded_inter = padded_sizes(chosen, hidden, inter)
    # Gate and up are padded apart, so that gate stays the first half.
    halves = w13.reshape(experts, 2, inter, hidden)
    w13 = _pad(halves, padded_inter, padded_hidden).reshape(
        experts, 2 * padded_inter, padded_hidden
    )
    w2 = _pad(w2, padded_out, padded_inter)
    if chosen.quantized:
        packed = target in ("sm100", "sm120")
        w13, w13_scale = _quantize(w13, w13_scale, packed)
        w2, w2_scale = _quantize(w2, w2_scale, packed)
    else:
        w13, w2 = w13.to(chosen.weight_dtype), w2.to(chosen.weight_dtype)
    return MoEWeights(w13, w13_scale, w2, w2_scale, recipe, target, hidden, inter)
