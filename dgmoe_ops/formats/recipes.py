"""The recipes: what weights and activations are made of. A layer names one; everything else follows
from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layouts import GROUPS_PER_WORD, MX_GROUP, ScaleLayout, ceil_div
from .weights import WeightFormat, formats_of, refuse_weight

TARGETS = ("cpu", "sm90", "sm100", "sm120")  #: what weights are prepared for

Granularity = tuple[int, int]  #: rows and columns that share a scale


@dataclass(frozen=True)
class Recipe:
    """Dtypes, scale groups and paddings of one way to run the layer.

    Attributes:
        name: what `fused_moe(recipe=...)` and `prepare_weights(recipe=...)` take.
        weight_dtype: dtype of w13 and w2.
        group_size: columns of an activation that share a scale; 0 where activations are not
            quantised.
        weight_block: (rows, columns) of a weight that share a scale, or None.
        k_multiple: hidden and intermediate sizes are padded to a multiple of this at weight
            preparation.
        scale_layouts: (target, layout of the weight scales there); what is missing cannot be
            prepared.
        sources: the checkpoint forms that `prepare_weights` makes it from.
        values_per_element: 2 where an element of the weight tensor holds two values.
    """

    name: str
    weight_dtype: torch.dtype
    group_size: int
    weight_block: tuple[int, int] | None
    k_multiple: int
    scale_layouts: tuple[tuple[str, str], ...]
    sources: tuple[WeightFormat, ...]
    values_per_element: int = 1

    @property
    def quantized(self) -> bool:
        return self.group_size > 0

    @property
    def mx(self) -> bool:
        """Whether weights are in a Microscaling format: packed UE8M0 scales a row and 32
        columns."""
        return self.weight_block is not None and self.weight_block[0] == 1

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of what the GEMMs read beside the weights."""
        return torch.float8_e4m3fn if self.quantized else torch.bfloat16

    def columns_of(self, weight: torch.Tensor) -> int:
        """The values in a row of a weight."""
        return weight.shape[-1] * self.values_per_element

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k values of a weight."""
        return ceil_div(k, self.values_per_element) * self.weight_dtype.itemsize

    def weight_scale_shape(self, experts: int, n: int, k: int, packed: bool) -> tuple[int, ...]:
        """The shape of the scales of `experts` weights of n rows and k columns: packed UE8M0 words
        a row, or fp32 a block."""
        rows, columns = self.weight_block
        if packed:
            return (experts, n, ceil_div(k, GROUPS_PER_WORD * columns))
        return (experts, ceil_div(n, rows), ceil_div(k, columns))

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(target for target, _ in self.scale_layouts)

    def weight_scale_layout(self, target: str) -> str:
        """The form of the weight scales for a target: "none", "block_fp32" or "packed_ue8m0"."""
        for known, form in self.scale_layouts:
            if known == target:
                return form
        raise ValueError(
            f"dgmoe_ops.recipes: target must be one of {', '.join(self.targets)} for recipe"
            f" {self.name}, got {target!r}"
        )

    def scale_layout_name(self, packed: bool) -> str:
        """The form of weight scales that are packed or not: what `platforms` calls it."""
        if not self.quantized:
            return "none"
        return "packed_ue8m0" if packed or self.mx else "block_fp32"

    def scale_layout(self, weight_scale: torch.Tensor | None) -> ScaleLayout:
        """The form of activation scales that goes with these weight scales: the tensor decides, not
        the device."""
        packed = weight_scale is not None and weight_scale.dtype == torch.int32
        return ScaleLayout.PACKED_UE8M0 if packed else ScaleLayout.MN_MAJOR


BF16 = Recipe(
    "bf16",
    torch.bfloat16,
    group_size=0,
    weight_block=None,
    k_multiple=64,
    scale_layouts=tuple((target, "none") for target in TARGETS),
    sources=(WeightFormat.FLOAT,),
)
FP8_BLOCK = Recipe(
    "fp8_block",
    torch.float8_e4m3fn,
    group_size=128,
    weight_block=(128, 128),
    k_multiple=128,
    scale_layouts=(
        ("cpu", "block_fp32"),
        ("sm90", "block_fp32"),
        ("sm100", "packed_ue8m0"),
        ("sm120", "packed_ue8m0"),
    ),
    sources=(
        WeightFormat.FLOAT,
        WeightFormat.FP8_BLOCK,
        WeightFormat.FP8_TENSOR,
        WeightFormat.MXFP4,
    ),
)
MXFP8 = Recipe(
    "mxfp8",
    torch.float8_e4m3fn,
    group_size=MX_GROUP,
    weight_block=(1, MX_GROUP),
    k_multiple=128,
    # SM120 has no cell for it.
    scale_layouts=tuple((target, "packed_ue8m0") for target in ("cpu", "sm90", "sm100")),
    sources=(WeightFormat.FLOAT, WeightFormat.MXFP8),
)
#: FP4 weights under FP8 activations in groups of 128
MXFP4 = Recipe(
    "mxfp4",
    torch.int8,
    group_size=128,
    weight_block=(1, MX_GROUP),
    k_multiple=128,
    scale_layouts=tuple((target, "packed_ue8m0") for target in TARGETS),
    sources=(WeightFormat.FLOAT, WeightFormat.MXFP4),
    values_per_element=2,
)

#: what the layer runs
RECIPES: dict[str, Recipe] = {r.name: r for r in (BF16, FP8_BLOCK, MXFP8, MXFP4)}


def _fail(where: str, arg: str, must: str, got) -> None:
    raise ValueError(f"dgmoe_ops.{where}: {arg} must {must}, got {got}")


def scale_recipes(
    recipe: Recipe | str,
    activation_block_size: int | None,
    hidden_size: int,
    activation_scale_width: int | None = None,
) -> tuple[Granularity | None, Granularity | None]:
    """Return `recipe_a` and `recipe_b` of a GEMM over `hidden_size` columns.

    Each GEMM of the layer asks for its own: GEMM2 has K = intermediate, and its activations may
    come in other groups than those that a dispatcher delivered.

    Args:
        recipe: a recipe or its name.
        activation_block_size: columns that share an activation scale, 32 or 128. Default the
            recipe's.
        hidden_size: K of this GEMM.
        activation_scale_width: words in a row of the packed UE8M0 activation scales, if known.

    Returns:
        (1, columns) for activations and weights where the recipe is an MX one; (None, None) where
        the GEMM's default is meant.

    Raises:
        ValueError: the recipe or the block size is unknown, or the width is not
            ceil(K / (4 * block size)) for mxfp8.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            known = ", ".join(RECIPES)
            _fail("scale_recipes", "recipe", f"be one of {known}", repr(recipe))
        recipe = RECIPES[recipe]
    if not recipe.mx:
        return None, None
    block = activation_block_size or recipe.group_size
    legal = (32, 128) if recipe is MXFP8 else (recipe.group_size,)
    if block not in legal:
        wanted = f"be {' or '.join(map(str, legal))} for recipe {recipe.name}"
        _fail("scale_recipes", "activation_block_size", wanted, block)
    width = ceil_div(hidden_size, block * GROUPS_PER_WORD)
    if recipe is MXFP8 and activation_scale_width not in (None, width):
        _fail(
            "scale_recipes",
            "activation_scale_width",
            f"be {width}, one word for {block * GROUPS_PER_WORD} of {hidden_size} columns",
            activation_scale_width,
        )
    return (1, block), (1, recipe.weight_block[1])


#: the recipe that takes a checkpoint form without conversion
RECIPE_OF: dict[WeightFormat, Recipe] = {
    WeightFormat.FLOAT: BF16,
    WeightFormat.FP8_BLOCK: FP8_BLOCK,
    WeightFormat.FP8_TENSOR: FP8_BLOCK,
    WeightFormat.MXFP8: MXFP8,
    WeightFormat.MXFP4: MXFP4,
}


def infer_recipe(w13: torch.Tensor, w13_scale: torch.Tensor | None = None) -> Recipe:
    """Tell the recipe of expert weights from dtypes and shapes.

    Args:
        w13: (experts, 2 * intermediate, hidden) bfloat16, float32 or float8_e4m3fn, or (experts,
            2 * intermediate, hidden / 2) int8 or uint8, two e2m1 codes a byte.
        w13_scale: as a checkpoint has it (see `prepare_weights`), or packed UE8M0 int32 as
            `prepare_weights` makes it; None for bfloat16 and float32.

    Returns:
        bf16 for floats; fp8_block for scales a tensor or a 128x128 block; mxfp8 or mxfp4 for scales
        a row and 32 columns.

    Raises:
        ValueError: nothing fits, or several do, as happens to scales of tiny weights.
    """
    if w13.dim() != 3 or w13.shape[1] % 2:
        must = "have shape (experts, 2 * intermediate, hidden)"
        _fail("infer_recipe", "w13", must, tuple(w13.shape))
    forms = formats_of(w13, w13_scale, 2, tuple(WeightFormat))
    if not forms:
        refuse_weight("dgmoe_ops.infer_recipe", "w13", w13, w13_scale, 2, tuple(WeightFormat))
    found = {RECIPE_OF[form].name for form in forms}
    if len(found) > 1:
        must = "tell the recipe (name it instead)"
        got = f"{tuple(w13_scale.shape)}, which fits {' and '.join(sorted(found))}"
        _fail("infer_recipe", "w13_scale", must, got)
    return RECIPE_OF[forms[0]]
