"""Read the experts of a layer from safetensors, prepared for a target."""

from __future__ import annotations

import os

import torch

from .. import _progress
from ..backends.platforms import arch_name, platform_of
from ..formats.recipes import FP8_BLOCK, RECIPE_OF, Recipe
from ..formats.weights import WeightFormat
from ..weights.prepare import MoEWeights, check_recipe, prepare_sources
from .experts import Cut, Experts
from .names import ROUTED, below, choose, fail
from .shapes import Layer, check_complete, describe
from .source import Files


def _target(device: torch.device) -> str:
    """What `prepare_weights` calls the architecture of a device."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    platform = platform_of(major * 10 + minor)
    if platform is None or platform.target is None:
        fail("target", "be given: no platform has this device", arch_name(major * 10 + minor))
    return platform.target


def _recipe(recipe: str | None, target: str, form: WeightFormat) -> Recipe:
    if recipe is None:
        chosen = RECIPE_OF[form]
        if target not in chosen.targets and form in FP8_BLOCK.sources:
            chosen = FP8_BLOCK
        recipe = chosen.name
    chosen = check_recipe("load_moe_layer", recipe, target)
    if form not in chosen.sources:
        must = f"take one of: {'; '.join(one.value for one in chosen.sources)}"
        fail(f"recipe {recipe}", must, f"a checkpoint of {form.value}")
    return chosen


def _check_experts(experts: tuple[int, int], count: int) -> None:
    start, stop = experts
    if not 0 <= start < stop <= count:
        must = f"be (start, stop), at least one of the {count} experts of the checkpoint"
        fail("experts", must, experts)


def _cut(experts: tuple[int, int], tp_rank: int, tp_size: int, layer: Layer) -> Cut:
    if layer.inter % tp_size:
        fail("tp_size", f"divide the intermediate size, {layer.inter}", tp_size)
    size = layer.inter // tp_size
    return Cut(*experts, tp_rank * size, (tp_rank + 1) * size, layer.inter)


def load_moe_layer(
    path: str | os.PathLike[str],
    prefix: str,
    *,
    group: str = ROUTED,
    layout: str | None = None,
    recipe: str | None = None,
    target: str | None = None,
    device: torch.device | str = "cpu",
    experts: tuple[int, int] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    search: bool = False,
    progress: bool = True,
) -> MoEWeights:
    """Read the experts of one layer from a safetensors checkpoint, prepared for a target.

    Files are mapped into memory and experts are converted one at a time: beyond the result it takes
    the memory of one expert. A rank reads only its part.

    Args:
        path: a file, an index (`*.safetensors.index.json`), or a folder with either.
        prefix: what stands before `.experts.` in the names of the layer, as in
            "model.layers.3.mlp", "layers.3.ffn", "model.layers.3.block_sparse_moe".
        group: "experts", or the name of shared experts, which are a layer of one expert:
            "shared_experts" (DeepSeek), "shared_expert" (Qwen2-MoE).
        layout: a name of `dgmoe_ops.checkpoints.LAYOUTS`. Default: told from the names.
        recipe: as in `prepare_weights`. Default: the one that takes the checkpoint as it is, or
            fp8_block where the target lacks that one and the conversion is there.
        target: as in `prepare_weights`. Default: what `device` is.
        device: of the result; experts are converted there.
        experts: (start, stop), the experts of this rank. Default: all.
        tp_rank, tp_size: which of how many equal parts of the intermediate size. Each rank's output
            is a summand of the layer's.
        search: as in `prepare_weights`.
        progress: show a bar where stderr is a terminal.

    Returns:
        `MoEWeights`, gate and up in halves whatever the order in the file, and biases where the
        layout has them: of w2 on tp_rank 0 only, so that the sum over ranks has it once.

    Raises:
        ValueError: no layout fits, tensors are missing or no layout has them, a dtype, a shape or a
            scale is wrong, a range is out of bounds, or a part of the intermediate size would cut
            what shares a scale. The message names the tensor.
        FileNotFoundError: there is no such file, or a file of the index is missing.
        ModuleNotFoundError: safetensors is not installed.
    """
    device = torch.device(device)
    if not 0 <= tp_rank < tp_size:
        fail("tp_rank", f"be at least 0 and below tp_size, {tp_size}", tp_rank)
    prefix = prefix.rstrip(".")
    with Files(path) as files:
        found, counted = choose(prefix, group, below(prefix, group, files.names), layout)
        start = f"{prefix}." if prefix else ""
        if not found.fused:
            experts = experts or (0, counted)
            _check_experts(experts, counted)
        check_complete(files, start, found, range(*(experts or (0, 0))))
        layer = describe(files, start, found, counted, experts[0] if experts else 0)
        experts = experts or (0, layer.experts)
        _check_experts(experts, layer.experts)
        cut = _cut(experts, tp_rank, tp_size, layer)
        target = _target(device) if target is None else target
        chosen = _recipe(recipe, target, layer.w13.form)
        w13 = Experts(files, start, found.w13, layer.w13, cut, device, layer.weight)
        w2 = Experts(files, start, (found.w2,), layer.w2, cut, device, layer.weight)
        text = f"loading {start}{group} as {chosen.name}"
        with _progress.steps(2 * w13.experts, text, progress) as advance:
            return prepare_sources(
                w13,
                w2,
                chosen,
                target,
                (layer.hidden, cut.high - cut.low),
                advance,
                search=search,
                w13_bias=w13.bias(),
                w2_bias=w2.bias() if tp_rank == 0 else None,
                gate_up_interleave=found.gate_up_interleave,
            )
