"""The ways to prepare the experts' weights that the demo compares, and what it asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dgmoe_ops import MoEWeights, export_weights, prepare_weights
from dgmoe_ops.formats.recipes import RECIPES, TARGETS

from .report import Check
from .split import Split


@dataclass(frozen=True)
class Variant:
    """One row of the demo: a recipe, and where a recipe leaves a choice, the choice.

    Attributes:
        name: of the row.
        recipe: of the layer.
        scales: form of the weight scales: "none", "block_fp32" or "packed_ue8m0".
        search: choose MXFP4 exponents by least squared error instead of the highest magnitude.
        from_mxfp4: make MXFP4 of the weights first, as a checkpoint that ships FP4 has them.
    """

    name: str
    recipe: str
    scales: str
    search: bool = False
    from_mxfp4: bool = False


BF16 = Variant("bf16", "bf16", "none")
FP8_FP32 = Variant("fp8_block, fp32 scales", "fp8_block", "block_fp32")
FP8_UE8M0 = Variant("fp8_block, UE8M0 scales", "fp8_block", "packed_ue8m0")
MXFP8 = Variant("mxfp8", "mxfp8", "packed_ue8m0")
MXFP4 = Variant("mxfp4", "mxfp4", "packed_ue8m0")
MXFP4_SEARCH = Variant("mxfp4, search=True", "mxfp4", "packed_ue8m0", search=True)
FP8_FROM_MXFP4 = Variant(
    "fp8_block from that MXFP4", "fp8_block", "block_fp32", search=True, from_mxfp4=True
)
VARIANTS = (BF16, FP8_FP32, FP8_UE8M0, MXFP8, MXFP4, MXFP4_SEARCH, FP8_FROM_MXFP4)


@dataclass(frozen=True)
class Bound:
    """The perplexity of one row over that of another (None: the dense model) must not pass this."""

    row: Variant
    over: Variant | None
    limit: float


BOUNDS = (
    Bound(FP8_FP32, None, 1.03),
    Bound(FP8_UE8M0, None, 1.03),
    Bound(MXFP8, None, 1.03),
    Bound(MXFP4, None, 1.35),
    Bound(MXFP4_SEARCH, MXFP4, 0.99),
    Bound(FP8_FROM_MXFP4, MXFP4_SEARCH, 1.01),
)


def target_of(variant: Variant, device: torch.device) -> str | None:
    """A `prepare_weights` target that gives the variant's scales and runs on the device, or None.

    The CPU kernels run what was prepared for any target.
    """
    targets = TARGETS
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        targets = ({9: "sm90", 10: "sm100", 12: "sm120"}.get(major, "sm90"),)
    forms = dict(RECIPES[variant.recipe].scale_layouts)
    return next((target for target in targets if forms.get(target) == variant.scales), None)


def prepare(split: Split, variant: Variant) -> MoEWeights:
    """Prepare the experts for the device they are on.

    Raises:
        ValueError: that device cannot run the variant.
    """
    target = target_of(variant, split.w13.device)
    if target is None:
        raise ValueError(f"variant must run on {split.w13.device}, got {variant.name}")
    weights = (split.w13, None, split.w2, None)
    common = {"target": target, "progress": False}
    if variant.from_mxfp4:
        fp4 = prepare_weights(*weights, recipe="mxfp4", search=variant.search, **common)
        return prepare_weights(*export_weights(fp4), recipe=variant.recipe, **common)
    return prepare_weights(*weights, recipe=variant.recipe, search=variant.search, **common)


def checks(perplexity: Mapping[Variant, float], dense: float) -> list[Check]:
    """Every bound whose rows were measured, with what was measured."""
    found = []
    for bound in BOUNDS:
        over = dense if bound.over is None else perplexity.get(bound.over)
        if over is not None and bound.row in perplexity:
            name = "dense" if bound.over is None else bound.over.name
            what = f"perplexity of {bound.row.name} over {name}"
            found.append(Check(what, perplexity[bound.row] / over, bound.limit))
    return found
