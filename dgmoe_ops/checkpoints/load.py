"""Read the experts of a layer from safetensors, prepared for a target."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import _progress
from ..backends.platforms import arch_name, platform_of
from ..formats.recipes import FP8_BLOCK, RECIPE_OF, Recipe
from ..formats.weights import WeightFormat
from ..weights.prepare import MoEWeights, check_recipe, prepare_sources
from . import arguments
from .experts import Cut, Experts
from .model_config import expert_count
from .names import ROUTED, Layout, below, choose, fail
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


def _check_experts(experts: range, count: int) -> None:
    if not 0 <= experts.start < experts.stop <= count:
        must = f"be (start, stop), at least one of the {count} experts of the checkpoint"
        fail("experts", must, (experts.start, experts.stop))


def _cut(experts: range, tp_rank: int, tp_size: int, layer: Layer) -> Cut:
    if layer.inter % tp_size:
        fail("tp_size", f"divide the intermediate size, {layer.inter}", tp_size)
    size = layer.inter // tp_size
    low, high = tp_rank * size, (tp_rank + 1) * size
    return Cut(experts.start, experts.stop, low, high, layer.inter)


@dataclass(frozen=True)
class _Count:
    """How many experts a layer has, by the caller or by its model's configuration.

    Attributes:
        number: of them, None where neither says it.
        given: whether the caller says it; a configuration may be wrong of a layer.
        source: who says it, in words.
    """

    number: int | None = None
    given: bool = False
    source: str = ""

    @classmethod
    def of(cls, num_experts: int | None, group: str, folder: Path) -> _Count:
        if num_experts is not None:
            return cls(num_experts, True, ", as num_experts says")
        key, number = (group == ROUTED and expert_count(folder)) or ("", None)
        if number is None:
            return cls()
        return cls(number, False, f", as {key} in config.json says (else give num_experts)")

    def check(self, counted: int) -> None:
        """Refuse a number that is not that of the checkpoint."""
        if self.given and counted != self.number:
            fail("num_experts", f"be {counted}, as the checkpoint has them", self.number)
        if self.number is not None and counted < self.number:
            fail("the checkpoint", f"have {self.number} experts{self.source}", counted)


def _experts(
    files: Files, start: str, found: Layout, counted: int, chosen: range | None, count: _Count
) -> range:
    """The experts to read of a layout that gives each its own tensors, all of which are there."""
    if count.given and (counted > count.number or not found.numbered):
        count.check(counted)
    if chosen is not None:
        _check_experts(chosen, counted)
        check_complete(files, start, found, chosen)
        return chosen
    if files.missing is not None and count.number is None and found.numbered:
        must = "be all shards, or experts or num_experts be given to say what this one must have"
        fail("path", must, f"one file without {files.missing}")
    number = max(counted, count.number or 0)
    check_complete(files, start, found, range(number), count.source)
    return range(number)


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
    num_experts: int | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    search: bool = False,
    progress: bool = True,
) -> MoEWeights:
    """Read the experts of one layer from a safetensors checkpoint, prepared for a target.

    Files are mapped into memory and experts are converted one at a time: beyond the result it takes
    the memory of one expert. A rank reads only its part.

    Args:
        path: a file, an index (`*.safetensors.index.json`), or a folder with either. A folder
            without an index must have every shard that names such as
            model-00001-of-00002.safetensors count. Such a shard alone is taken where a fused
            tensor, experts, num_experts or config.json says which experts it must have.
        prefix: what stands before `.experts.` in the names of the layer, as in
            "model.layers.3.mlp", "layers.3.ffn", "model.layers.3.block_sparse_moe".
        group: "experts", or the name of shared experts, which are a layer of one expert:
            "shared_experts" (DeepSeek), "shared_expert" (Qwen2-MoE).
        layout: a name of `dgmoe_ops.checkpoints.LAYOUTS`. Default: told from the names.
        recipe: as in `prepare_weights`. Default: the one that takes the checkpoint as it is, or
            fp8_block where the target lacks that one and the conversion is there.
        target: as in `prepare_weights`. Default: what `device` is.
        device: of the result; experts are converted there.
        experts: (start, stop), the experts of this rank; files need not have the others. Default:
            all.
        num_experts: how many experts the layer has over all ranks; a checkpoint that has others is
            refused. Default: what the config.json beside the files says (num_experts,
            n_routed_experts or num_local_experts; in text_config first), of which a checkpoint may
            have more but not fewer; without one, as many as there are.
        tp_rank, tp_size: which of how many equal parts of the intermediate size. Each rank's output
            is a summand of the layer's.
        search: as in `prepare_weights`.
        progress: show a bar where stderr is a terminal.

    Returns:
        `MoEWeights`, gate and up in halves whatever the order in the file, and biases where the
        layout has them: of w2 on tp_rank 0 only, so that the sum over ranks has it once.

    Raises:
        ValueError: an argument has the wrong type or value, no layout fits, tensors are missing or
            no layout has them, a dtype, a shape or a scale is wrong, experts are fewer than
            counted, a range is out of bounds, a part of the intermediate size would cut what shares
            a scale, or an entry of the index leads out of its folder. The message names the
            argument or the tensor.
        FileNotFoundError: there is no such file, or a file of the index or a shard is missing.
        RuntimeError: the device is not there.
        ModuleNotFoundError: safetensors is not installed.
    """
    arguments.text("prefix", prefix)
    arguments.text("group", group)
    for arg, value in (("layout", layout), ("recipe", recipe), ("target", target)):
        arguments.text(arg, value, optional=True)
    chosen = arguments.span("experts", experts)
    arguments.number("num_experts", num_experts, least=1, optional=True)
    arguments.number("tp_rank", tp_rank)
    arguments.number("tp_size", tp_size)
    if not 0 <= tp_rank < tp_size:
        fail("tp_rank", f"be at least 0 and below tp_size, {tp_size}", tp_rank)
    arguments.flag("search", search)
    arguments.flag("progress", progress)
    device = arguments.device("device", device)
    prefix = prefix.rstrip(".")
    with Files(arguments.path("path", path)) as files:
        found, counted = choose(prefix, group, below(prefix, group, files.names), layout)
        start = f"{prefix}." if prefix else ""
        count = _Count.of(num_experts, group, files.folder)
        if found.fused:
            check_complete(files, start, found, range(0))
        else:
            chosen = _experts(files, start, found, counted, chosen, count)
        layer = describe(files, start, found, counted, chosen.start if chosen else 0)
        if found.fused:
            count.check(layer.experts)
        chosen = range(layer.experts) if chosen is None else chosen
        _check_experts(chosen, layer.experts)
        cut = _cut(chosen, tp_rank, tp_size, layer)
        target = _target(device) if target is None else target
        made = _recipe(recipe, target, layer.w13.form)
        w13 = Experts(files, start, found.w13, layer.w13, cut, device, layer.weight)
        w2 = Experts(files, start, (found.w2,), layer.w2, cut, device, layer.weight)
        text = f"loading {start}{group} as {made.name}"
        with _progress.steps(2 * w13.experts, text, progress) as advance:
            return prepare_sources(
                w13,
                w2,
                made,
                target,
                (layer.hidden, cut.high - cut.low),
                advance,
                search=search,
                w13_bias=w13.bias(),
                w2_bias=w2.bias() if tp_rank == 0 else None,
                gate_up_interleave=found.gate_up_interleave,
            )
