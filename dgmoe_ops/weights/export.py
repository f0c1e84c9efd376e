"""Prepared weights back to the form that a checkpoint has."""

from __future__ import annotations

import torch

from ..formats.layouts import WEIGHT_BLOCK, ceil_div
from ..formats.recipes import RECIPES, Recipe
from .prepare import MoEWeights


def _slice(tensor: torch.Tensor, halves: int, rows: int, columns: int) -> torch.Tensor:
    """The first `rows` of each half and the first `columns`; a view where nothing was padded."""
    experts, n, k = tensor.shape
    if (halves * rows, columns) == (n, k):
        return tensor
    apart = tensor.view(experts, halves, n // halves, k)[:, :, :rows, :columns]
    return apart.reshape(experts, halves * rows, columns)


def _unpacked(packed: torch.Tensor, groups: int, every: int) -> torch.Tensor:
    """The exponent bytes of each `every`-th row, an expert at a time."""
    experts, n, _ = packed.shape
    shape = (experts, ceil_div(n, every), groups)
    out = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    for e in range(experts):
        # Unlike contiguous(), a clone has dense strides where there is one word a row.
        words = packed[e, ::every].clone(memory_format=torch.contiguous_format)
        out[e] = words.view(torch.uint8)[:, :groups]
    return out


def _scale(
    scale: torch.Tensor | None, recipe: Recipe, halves: int, rows: int, columns: int
) -> torch.Tensor | None:
    """The scales of `rows` rows in each half and `columns` values in a row."""
    if scale is None or scale.dtype == torch.float32:
        return scale
    block_rows, block_columns = recipe.weight_block
    groups = ceil_div(columns, block_columns)
    if block_rows == WEIGHT_BLOCK:
        # The rows of a block repeat its scale; halves are padded to whole blocks.
        byte = _unpacked(scale, groups, WEIGHT_BLOCK)
        return byte.view(torch.float8_e8m0fnu).float()
    return _slice(_unpacked(scale, groups, 1), halves, rows, groups)


def export_weights(
    weights: MoEWeights,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Take prepared weights back to checkpoint form: without padding, scales as `prepare_weights`
    reads them.

    Preparing the result for the same recipe and target gives the same bits. What a conversion
    changed (floats quantised, FP8 blocks requantised, MXFP4 made FP8) stays changed.

    Args:
        weights: from `prepare_weights`.

    Returns:
        w13, w13_scale, w2, w2_scale. Scales are None for bf16, float32 a 128x128 block for
        fp8_block, and uint8 exponent bytes (experts, rows, ceil(columns / 32)) for mxfp8 and mxfp4.
        What needs no copy shares memory with `weights`.
    """
    recipe = RECIPES[weights.recipe]
    hidden, inter = weights.hidden_size, weights.intermediate_size
    exported = []
    for weight, scale, halves, rows, columns in (
        (weights.w13, weights.w13_scale, 2, inter, hidden),
        (weights.w2, weights.w2_scale, 1, hidden, inter),
    ):
        exported.append(_slice(weight, halves, rows, ceil_div(columns, recipe.values_per_element)))
        exported.append(_scale(scale, recipe, halves, rows, columns))
    return tuple(exported)


def export_biases(weights: MoEWeights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Take the biases of prepared weights back: without padding, gate columns, then up columns.

    Args:
        weights: from `prepare_weights` or `load_moe_layer`.

    Returns:
        w13_bias (experts, 2 * intermediate) and w2_bias (experts, hidden), or None where there is
        none.
    """
    w13_bias, inter = weights.w13_bias, weights.intermediate_size
    if w13_bias is not None and w13_bias.shape[1] != 2 * inter:
        w13_bias = w13_bias.unflatten(1, (2, -1))[..., :inter].flatten(1)
    return w13_bias, weights.w2_bias
