"""What the device of a call takes: the table of platforms and what its grouped GEMMs need, asked
before anything runs and in the words of `fused_moe`'s arguments."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..backends import platforms, scopes
from ..backends.deep_gemm import rules
from ..backends.scales import is_laid_out
from ..formats.layouts import CONTIG_ALIGNMENT, Layout, ScaleLayout
from ..formats.recipes import Recipe

_ADDRESS_BYTES = 16  #: to which TMA aligns what it reads
_N_MULTIPLE = 8  #: bf16 columns in those bytes


class Device(NamedTuple):
    """What a device is, as far as a call depends on it."""

    arch: int | str | None  #: as `platforms` names it; None for a GPU of which nothing is known
    memory_bytes: int | None  #: None where a slab buys nothing


@functools.lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Look up a device; CUDA tensors of a trace on a machine without a GPU have none."""
    if device.type != "cuda":
        return Device("cpu", None)
    if not torch.cuda.is_available():
        return Device(None, None)
    found = torch.cuda.get_device_properties(device)
    return Device(10 * found.major + found.minor, found.total_memory)


def device_name(device: Device) -> str:
    """Name a device for people to read."""
    return "the device" if device.arch is None else platforms.arch_name(device.arch)


def _fail(arg: str, must: str, got: object) -> None:
    raise ValueError(f"dgmoe::fused_moe: {arg} must {must}, got {got}")


def check_legal(device: Device, recipe: Recipe, layout: str, packed: bool) -> tuple[Layout, ...]:
    """Return the layouts that the device runs of a recipe with such weight scales.

    Raises:
        ValueError: it runs none, or not the one that is named.
    """
    if device.arch is None:
        return tuple(Layout)
    form = recipe.scale_layout_name(packed)
    legal = platforms.legal_layouts(device.arch, recipe.name, form)
    if not legal:
        _refuse_everywhere(device, recipe, form)
    if layout != "auto" and Layout(layout) not in legal:
        names = " or ".join([name.value for name in legal])
        _fail(
            "layout", f"be {names} for recipe {recipe.name} on {device_name(device)}", repr(layout)
        )
    return legal


def _refuse_everywhere(device: Device, recipe: Recipe, form: str) -> None:
    platform = platforms.platform_of(device.arch)
    runs = platforms.runs_at(recipe.name)
    if platform is None or not platform.cells:
        _fail(
            "hidden_states",
            f"be on a device that grouped GEMMs exist for ({recipe.name} runs on {runs})",
            device_name(device),
        )
    forms = platforms.scale_layouts(device.arch, recipe.name)
    if not forms:
        _fail(
            "recipe",
            f"be one that {device_name(device)} runs ({recipe.name} runs on {runs})",
            recipe.name,
        )
    _fail(
        "w13_scale and w2_scale",
        f"be {' or '.join(forms)} for recipe {recipe.name} on {device_name(device)}"
        f' (prepare_weights with target="{platform.target}")',
        form,
    )


def _check_scale(arg: str, scale: torch.Tensor, device: Device) -> None:
    if scale.dtype == torch.float32:
        if not scale.is_contiguous():
            _fail(arg, f"be contiguous on {device_name(device)}", f"strides {scale.stride()}")
    elif not is_laid_out(scale, ScaleLayout.PACKED_UE8M0):
        _fail(
            arg,
            f"be MN-major and TMA-aligned on {device_name(device)}, as prepare_weights makes it",
            f"shape {tuple(scale.shape)} with strides {scale.stride()}",
        )


def _k_multiple(recipe: Recipe, ours: bool) -> int:
    """What the grouped GEMMs of GPUs take k in multiples of."""
    # A tensor map unpacks 128 FP4 values at a time; a k block of our kernels is as long.
    if ours or recipe.values_per_element > 1:
        return 128
    return 16 if recipe.quantized else 64


def _check_weight(
    arg: str, weight: torch.Tensor, device: Device, recipe: Recipe, k_multiple: int
) -> None:
    k, n = recipe.columns_of(weight), weight.shape[1]
    where = f"on {device_name(device)} (prepare_weights pads them)"
    if k % k_multiple:
        columns = k_multiple // recipe.values_per_element
        of = "" if recipe.values_per_element == 1 else f" of {recipe.values_per_element} values"
        _fail(arg, f"have a multiple of {columns} columns{of} {where}", tuple(weight.shape))
    if n % _N_MULTIPLE:
        _fail(arg, f"have a multiple of {_N_MULTIPLE} rows {where}", tuple(weight.shape))


def check_weights(
    device: Device,
    recipe: Recipe,
    legal: tuple[Layout, ...],
    weights: dict[str, torch.Tensor],
    scales: dict[str, torch.Tensor | None],
) -> None:
    """Check of weights and their scales what the grouped GEMMs of a GPU would refuse, which run
    only after the tokens are placed.

    Raises:
        ValueError: a size or the strides of a scale do not fit.
    """
    if device.arch is None or device.arch == "cpu":
        return
    packed = any([s is not None and s.dtype == torch.int32 for s in scales.values()])
    form = recipe.scale_layout_name(packed)
    ours = platforms.backend_of(device.arch, recipe.name, legal[0], form) == "dgmoe_ops"
    k_multiple = _k_multiple(recipe, ours)
    for arg, weight in weights.items():
        _check_weight(arg, weight, device, recipe, k_multiple)
    for arg, scale in scales.items():
        # Our own kernels read scales of any strides.
        if scale is not None and not ours:
            _check_scale(arg, scale, device)


def check_addresses(device: Device, **tensors: torch.Tensor | None) -> None:
    """Check where weights and packed scales start.

    Raises:
        ValueError: not on 16 bytes, on a GPU.
    """
    if device.arch is None or device.arch == "cpu":
        return
    for arg, tensor in tensors.items():
        # float32 scales are read one by one.
        if tensor is None or tensor.dtype == torch.float32:
            continue
        past = tensor.data_ptr() % _ADDRESS_BYTES
        if past:
            must = f"start on {_ADDRESS_BYTES} bytes on {device_name(device)}"
            _fail(arg, must, f"an address {past} past them")


def check_alignment(device: Device, layout: Layout) -> None:
    """Check the scope `contiguous_alignment` against the segments that the layer makes.

    Raises:
        ValueError: a GEMM's M block would reach over the end of a segment, or the architecture has
            no such alignment.
    """
    rows = scopes.current().alignment
    if rows is None or layout.has_slabs or device.arch is None or device.arch == "cpu":
        return
    rule = rules.rule_of(device.arch // 10)
    fits = [r for r in rule.alignments if CONTIG_ALIGNMENT % r == 0]
    if rows not in fits:
        legal = ", ".join(map(str, fits))
        of = f"{CONTIG_ALIGNMENT}, to which the layer pads segments"
        _fail(
            "contiguous_alignment",
            f"be one of {legal} on {device_name(device)}, parts of {of}",
            rows,
        )
