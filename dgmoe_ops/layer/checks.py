"""The argument checks of `fused_moe`. All of them run before the first op of the layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._sanity import at, first_where, looks_at
from ..config import sanity_check
from ..formats.layouts import LAYOUT_ARGUMENTS, Layout, ceil_div, round_up
from ..formats.recipes import RECIPES, Recipe
from ..formats.symbolic import same_size
from ..ops._registry import autograd_follows, one_device, refuse_grad, wants_grad
from .activations import activation_keywords, check_activation, float32_fault
from .device import Device, check_addresses, check_legal, check_weights, device_of

GATE_UP_INTERLEAVES = (0, 1, 8)
PARAMETERS = ("swiglu_limit", "gemm1_alpha", "gemm1_clamp_limit", "beta", "linear_beta")
_ID_DTYPES = (torch.int32, torch.int64)
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Between(NamedTuple):
    """What happens between the GEMMs, as the caller says it."""

    activation: str = "silu"
    swiglu_limit: float | None = None
    gemm1_alpha: float | None = 1.702
    gemm1_clamp_limit: float | None = 7.0
    beta: float | None = None
    linear_beta: float | None = None
    gate_up_interleave: int = 0
    round_activation: bool = False
    bias: torch.Tensor | None = None


class Arguments(NamedTuple):
    """What a call of the layer is given."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    recipe: str
    num_experts: int | None
    expert_start: int
    between: Between
    w2_bias: torch.Tensor | None
    routed_scaling_factor: float
    layout: str


class Checked(NamedTuple):
    """What the checks found out."""

    recipe: Recipe
    num_experts: int  #: over all ranks
    activation: dict[str, float | None]  #: keywords of the activation's op
    device: Device
    legal: tuple[Layout, ...]  #: what the device runs


def _fail(arg: str, must: str, got) -> None:
    raise ValueError(f"dgmoe::fused_moe: {arg} must {must}, got {got}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(arg: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        _fail(arg, f"be {' or '.join(map(_name, allowed))}", _name(tensor.dtype))


def _dim(arg: str, tensor: torch.Tensor, dim: int, shape: str) -> None:
    if tensor.dim() != dim:
        _fail(arg, f"have shape {shape}", tuple(tensor.shape))


def _scale(arg: str, scale, weight: torch.Tensor, recipe: Recipe) -> None:
    if not recipe.quantized:
        if scale is not None:
            _fail(arg, f"be None for recipe {recipe.name}", f"a {_name(scale.dtype)} tensor")
        return
    if scale is None:
        _fail(arg, f"be given for recipe {recipe.name}", None)
    _dtype(arg, scale, (torch.int32,) if recipe.mx else (torch.float32, torch.int32))
    packed = scale.dtype == torch.int32
    sizes = (*weight.shape[:2], recipe.columns_of(weight), packed)
    shape = recipe.weight_scale_shape(*sizes)
    if tuple(scale.shape) != shape:
        form = "packed UE8M0 int32" if packed else "float32 block"
        _fail(
            arg,
            f"have shape {shape} as {form} scales of recipe {recipe.name}",
            f"{tuple(scale.shape)}{_whose(scale, weight, sizes)}",
        )


def _whose(scale: torch.Tensor, weight: torch.Tensor, sizes: tuple) -> str:
    """Name the recipe that the weights must have been prepared for, where one fits."""
    for recipe in RECIPES.values():
        fits = recipe.quantized and recipe.weight_dtype == weight.dtype
        if fits and recipe.weight_scale_shape(*sizes) == tuple(scale.shape):
            return f", as weights prepared for recipe {recipe.name} have it"
    return ""


def _columns(k: int, recipe: Recipe) -> str:
    """A count of columns, in words where an element holds more than one."""
    per = recipe.values_per_element
    return f"{k} columns" if per == 1 else f"{ceil_div(k, per)} columns of {per} values"


def _bias(arg: str, bias: torch.Tensor | None, experts: int, least: int, most: int) -> None:
    if bias is None:
        return
    _dtype(arg, bias, (torch.float32, torch.bfloat16))
    _dim(arg, bias, 2, f"({experts}, {least})")
    if bias.shape[0] != experts:
        _fail(arg, f"have a row for each of the {experts} local experts", tuple(bias.shape))
    if not least <= bias.shape[1] <= most:
        padded = "" if least == most else f" to {most}"
        _fail(arg, f"have {least}{padded} columns", tuple(bias.shape))


def _activation(between: Between, symbolic: bool) -> dict[str, float | None]:
    """The keywords of the activation's op."""
    given = {name: getattr(between, name) for name in PARAMETERS}
    if between.gate_up_interleave not in GATE_UP_INTERLEAVES:
        _fail(
            "gate_up_interleave",
            f"be one of {', '.join(map(str, GATE_UP_INTERLEAVES))}",
            between.gate_up_interleave,
        )
    if symbolic:
        return activation_keywords(between.activation, given, "dgmoe::fused_moe: ")
    return check_activation(between.activation, "dgmoe::fused_moe: ", **given)


def _check_ids(topk_ids: torch.Tensor, total: int) -> None:
    where = first_where((topk_ids < -1) | (topk_ids > total))
    if where is not None:
        must = f"hold -1 (not routed) to {total}, the number of experts (not routed either)"
        _fail("topk_ids", must, f"{int(topk_ids[where])} at {at(where)}")


_known: dict[tuple, Checked] = {}  # calls that passed, by all that the checks of shapes look at
_MOST_KNOWN = 4096


def _tensors(call: Arguments) -> dict[str, torch.Tensor | None]:
    """The tensors of a call by the names that its caller knows."""
    return {
        "hidden_states": call.hidden_states,
        "topk_weights": call.topk_weights,
        "topk_ids": call.topk_ids,
        "w13": call.w13,
        "w13_scale": call.w13_scale,
        "w2": call.w2,
        "w2_scale": call.w2_scale,
        "w13_bias": call.between.bias,
        "w2_bias": call.w2_bias,
    }


def _key(call: Arguments, tensors: dict[str, torch.Tensor | None]) -> tuple:
    return (
        call.recipe,
        call.num_experts,
        call.expert_start,
        call.between[:-1],
        call.routed_scaling_factor,
        call.layout,
        *[
            None if t is None else (t.dtype, t.device, t.shape, t.stride())
            for t in tensors.values()
        ],
    )


def check_layer(call: Arguments) -> Checked:
    """Check every argument of the layer. What passed once is known by its dtypes and shapes."""
    tensors = _tensors(call)
    symbolic = torch.compiler.is_compiling()
    if symbolic or type(call.hidden_states) is not torch.Tensor:
        checked = _check_shapes(call, _devices(tensors), symbolic)
    else:
        key = _key(call, tensors)
        checked = _known.get(key)
        if checked is None:
            checked = _check_shapes(call, _devices(tensors), symbolic)
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = checked
        check_addresses(
            checked.device,
            w13=call.w13,
            w2=call.w2,
            w13_scale=call.w13_scale,
            w2_scale=call.w2_scale,
        )
    if autograd_follows():
        for arg, tensor in tensors.items():
            if tensor is not None and wants_grad(tensor):
                refuse_grad("fused_moe", arg)
    if sanity_check() and looks_at(call.topk_ids):
        _check_ids(call.topk_ids, checked.num_experts)
    return checked


def _devices(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.device]:
    return {arg: tensor.device for arg, tensor in tensors.items() if tensor is not None}


def check_stand_ins_of_layer(
    call: Arguments, out: torch.Tensor | None, devices: dict[str, torch.device]
) -> None:
    """Check all that tensors without memory tell: what is left are addresses and contents.

    `devices` are those of the tensors that the call really has, by argument.
    """
    _check_shapes(call, devices, symbolic=False)
    if out is not None:
        _check_buffer(out, call.hidden_states, devices["out"], devices["hidden_states"])


def _check_shapes(call: Arguments, devices: dict[str, torch.device], symbolic: bool) -> Checked:
    """Check all that dtypes, shapes, strides, devices and numbers tell.

    `symbolic` numbers are left to the ops that take them, which look at them again.
    """
    hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, *others = call
    recipe, num_experts, expert_start, between, w2_bias, routed_scaling_factor, layout = others
    if recipe not in RECIPES:
        _fail("recipe", f"be one of {', '.join(RECIPES)}", repr(recipe))
    keywords = _activation(between, symbolic)
    if layout not in LAYOUT_ARGUMENTS:
        _fail("layout", f"be one of {', '.join(LAYOUT_ARGUMENTS)}", repr(layout))
    if not symbolic:
        fault = float32_fault(routed_scaling_factor)
        if fault is not None:
            _fail("routed_scaling_factor", fault, routed_scaling_factor)
    chosen = RECIPES[recipe]

    _dtype("hidden_states", hidden_states, (torch.bfloat16,))
    _dim("hidden_states", hidden_states, 2, "(tokens, hidden)")
    _dtype("topk_ids", topk_ids, _ID_DTYPES)
    _dim("topk_ids", topk_ids, 2, "(tokens, top_k)")
    _dtype("topk_weights", topk_weights, _WEIGHT_DTYPES)
    _dim("topk_weights", topk_weights, 2, "(tokens, top_k)")
    tokens, hidden = hidden_states.shape
    if not same_size(topk_ids.shape[0], tokens):
        _fail("topk_ids", f"have {tokens} rows, one a token", tuple(topk_ids.shape))
    (rows, columns), (tokens_of_ids, top_k) = topk_weights.shape, topk_ids.shape
    if not (same_size(rows, tokens_of_ids) and same_size(columns, top_k)):
        _fail(
            "topk_weights",
            f"have the shape of topk_ids, {tuple(topk_ids.shape)}",
            tuple(topk_weights.shape),
        )

    for arg, weight in (("w13", w13), ("w2", w2)):
        _dtype(arg, weight, (chosen.weight_dtype,))
        _dim(
            arg,
            weight,
            3,
            "(experts, 2 * intermediate, hidden)"
            if arg == "w13"
            else "(experts, hidden, intermediate)",
        )
        if not weight.is_contiguous():
            _fail(arg, "be contiguous", f"strides {weight.stride()}")
    experts, rows13, _ = w13.shape
    k13 = chosen.columns_of(w13)
    padded = round_up(hidden, chosen.k_multiple)
    if k13 != hidden and k13 != padded:
        must = f"have {_columns(hidden, chosen)} (the hidden size) or, padded, "
        got = f"{tuple(w13.shape)} for hidden_states {tuple(hidden_states.shape)}"
        _fail("w13", must + _columns(padded, chosen), got)
    if rows13 % 2:
        _fail("w13", "have an even number of rows, gate and up", tuple(w13.shape))
    if w2.shape[0] != experts:
        _fail("w2", f"have the {experts} experts of w13", tuple(w2.shape))
    if not hidden <= w2.shape[1] <= padded:
        _fail(
            "w2",
            f"have {hidden} rows (the hidden size) or, padded, up to {padded}",
            tuple(w2.shape),
        )
    if chosen.columns_of(w2) * 2 != rows13:
        must = f"have {_columns(rows13 // 2, chosen)}, half the rows of w13"
        _fail("w2", must, f"{tuple(w2.shape)} for w13 {tuple(w13.shape)}")
    _scale("w13_scale", w13_scale, w13, chosen)
    _scale("w2_scale", w2_scale, w2, chosen)
    if chosen.quantized and w13_scale.dtype != w2_scale.dtype:
        _fail(
            "w2_scale",
            f"have the dtype of w13_scale, {_name(w13_scale.dtype)}",
            _name(w2_scale.dtype),
        )

    _bias("w13_bias", between.bias, experts, rows13, rows13)
    _bias("w2_bias", w2_bias, experts, hidden, w2.shape[1])

    if not 0 <= expert_start < 2**31:
        _fail("expert_start", "be at least 0 and below 2^31", expert_start)
    total = expert_start + experts if num_experts is None else num_experts
    if total < expert_start + experts:
        _fail(
            "num_experts",
            f"be at least expert_start + local experts, {expert_start + experts}",
            num_experts,
        )

    one_device("fused_moe", devices)
    device = device_of(devices["w13"])
    packed = w13_scale is not None and w13_scale.dtype == torch.int32
    legal = check_legal(device, chosen, layout, packed)
    weights, scales = {"w13": w13, "w2": w2}, {"w13_scale": w13_scale, "w2_scale": w2_scale}
    check_weights(device, chosen, legal, weights, scales)
    return Checked(chosen, total, keywords, device, legal)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last; 0, 0 when empty."""
    if tensor.numel() == 0:
        return 0, 0
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _check_overlap(out: torch.Tensor, call: Arguments) -> None:
    """Refuse a buffer that shares memory with what later stages read.

    hidden_states is not among that: stage 2b copies it into rows of its own, and the result is
    written behind the last GEMM.
    """
    begin, end = _extent(out)
    for arg, tensor in _tensors(call).items():
        if tensor is None or arg == "hidden_states":
            continue
        first, behind = _extent(tensor)
        if first < end and begin < behind:
            _fail("out", f"share no memory with {arg}", "a tensor that does")


def _check_buffer(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    device: torch.device,
    wanted_device: torch.device,
) -> None:
    _dtype("out", out, (hidden_states.dtype,))
    wanted = tuple(hidden_states.shape)
    if tuple(out.shape) != wanted:
        _fail("out", f"have the shape of hidden_states, {wanted}", tuple(out.shape))
    if device != wanted_device:
        _fail("out", f"be on the device of hidden_states ({wanted_device})", device)
    if not out.is_contiguous():
        _fail("out", "be contiguous", f"strides {out.stride()}")


def check_out(out: torch.Tensor, call: Arguments) -> None:
    """Check the buffer that the caller gives for the result."""
    _check_buffer(out, call.hidden_states, out.device, call.hidden_states.device)
    if torch.is_grad_enabled() and out.requires_grad:
        refuse_grad("fused_moe", "out")
    # Tensors that stand for others have no address; the op that writes looks at it again.
    if torch.compiler.is_compiling() or type(out) is not torch.Tensor:
        return
    if out.data_ptr() % 16:
        _fail("out", "start on 16 bytes", f"an address {out.data_ptr() % 16} past them")
    _check_overlap(out, call)
