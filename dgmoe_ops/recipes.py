"""The recipes: what weights and activations are made of. A layer names one; everything else follows
from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layouts import ScaleForm


@dataclass(frozen=True)
class Recipe:
    """Dtypes, scale groups and paddings of one way to run the layer.

    Attributes:
        name: what `fused_moe(recipe=...)` takes.
        weight_dtype: dtype of w13 and w2.
        group_size: columns of an activation that share a scale; 0 where activations are not
            quantised.
        weight_block: (rows, columns) of a weight that share a scale, or None.
        k_multiple: hidden and intermediate sizes are padded to a multiple of this at weight
            preparation.
    """

    name: str
    weight_dtype: torch.dtype
    group_size: int
    weight_block: tuple[int, int] | None
    k_multiple: int

    @property
    def quantized(self) -> bool:
        return self.group_size > 0

    def scale_form(self, weight_scale: torch.Tensor | None) -> ScaleForm:
        """The form of activation scales that goes with these weight scales: the tensor decides, not
        the device."""
        packed = weight_scale is not None and weight_scale.dtype == torch.int32
        return ScaleForm.PACKED_UE8M0 if packed else ScaleForm.MN_MAJOR


BF16 = Recipe("bf16", torch.bfloat16, group_size=0, weight_block=None, k_multiple=64)
FP8_BLOCK = Recipe(
    "fp8_block", torch.float8_e4m3fn, group_size=128, weight_block=(128, 128), k_multiple=128
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (BF16, FP8_BLOCK)}
