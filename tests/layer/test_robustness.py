"""What a model around the layer does to it: autocast, meta weights, saved buffers, forward AD."""

import copy

import pytest
import torch
from helpers import beside, refused
from torch.autograd import forward_ad

import dgmoe_ops
from dgmoe_ops.formats.layouts import LayoutFacts, choose_layout
from dgmoe_ops.testing.layer import layer_inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp4", "bf16"])
def test_autocast_changes_nothing(recipe, dtype, device):
    """With many rows an expert too, where the CPU calls PyTorch's matrix product."""
    args, kwargs = layer_inputs(600, 2, 1, recipe, device)
    want = torch.ops.dgmoe.fused_moe(*args, **kwargs)
    with torch.autocast(device.type, dtype=dtype):
        got = torch.ops.dgmoe.fused_moe(*args, **kwargs)
        inline = dgmoe_ops.fused_moe_inline(*args, **kwargs)
    assert torch.equal(got, want) and torch.equal(inline, want)


def test_a_tensor_left_on_meta_is_named(device):
    args, kwargs = layer_inputs(8, 4, 2, "fp8_block", device)
    names = ("hidden_states", "topk_weights", "topk_ids", "w13", "w13_scale", "w2", "w2_scale")
    for i, name in list(enumerate(names))[1:]:
        spoiled = [t.to("meta") if j == i else t for j, t in enumerate(args)]
        for call in (torch.ops.dgmoe.fused_moe, dgmoe_ops.fused_moe_inline):
            with pytest.raises(ValueError, match=f"fused_moe: {name} must be on the device of"):
                call(*spoiled, **kwargs)
    with pytest.raises(ValueError, match="post_reorder_deepgemm: topk_weights must be on"):
        y = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
        index = torch.zeros(2, 1, dtype=torch.int32, device=device)
        torch.ops.dgmoe.post_reorder_deepgemm(y, index, torch.ones(2, 1, device="meta"))


def test_a_written_buffer_is_seen_by_autograd(device):
    args, kwargs = layer_inputs(8, 4, 2, "bf16", device)
    weight = torch.ones_like(args[0], requires_grad=True)
    for write in (torch.ops.dgmoe.fused_moe.out, dgmoe_ops.fused_moe_inline):
        buffer = torch.ones_like(args[0])
        loss = (weight * buffer).sum()
        write(*args, out=buffer, **kwargs)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_forward_mode_is_refused(device):
    args, kwargs = layer_inputs(8, 4, 2, "bf16", device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        for call in (torch.ops.dgmoe.fused_moe, dgmoe_ops.fused_moe_inline):
            with pytest.raises(RuntimeError, match="hidden_states must not require grad"):
                call(dual, *args[1:], **kwargs)


@pytest.mark.parametrize("dynamic", [None, True])
def test_inline_with_a_buffer_compiles(dynamic, device):
    torch._dynamo.reset()
    args, kwargs = layer_inputs(12, 4, 2, "fp8_block", device)

    def write(out):
        return dgmoe_ops.fused_moe_inline(*args, out=out, **kwargs) + 1

    compiled = torch.compile(write, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    buffer = torch.zeros_like(args[0])
    want = torch.ops.dgmoe.fused_moe(*args, **kwargs)
    assert torch.equal(compiled(buffer), want + 1) and torch.equal(buffer, want)


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_choice_of_a_gpu_compiles(dynamic):
    torch._dynamo.reset()

    def chosen(x):
        facts = LayoutFacts("auto", x.shape[0], 8, 256, 7168, 2048, True, 150 << 30)
        return x + (1 if choose_layout(facts) == "masked" else 2)

    compiled = torch.compile(chosen, fullgraph=True, dynamic=dynamic, backend="eager")
    # One graph for any number of tokens takes what fits them all.
    most = 256 if dynamic else 128
    assert compiled(torch.zeros(128)).sum() == most and compiled(torch.zeros(4)).sum() == 8


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e39, -1e39, 1e-39, -1e-46])
def test_a_factor_that_float32_does_not_hold_is_refused(factor, device):
    args, kwargs = layer_inputs(8, 4, 2, "bf16", device)
    must = "be finite as float32" if not abs(factor) < 1 else "be 0 or at least 1.18e-38"
    for call in (torch.ops.dgmoe.fused_moe, dgmoe_ops.fused_moe_inline):
        with pytest.raises(ValueError, match=f"fused_moe: routed_scaling_factor must {must}"):
            call(*args, routed_scaling_factor=factor, **kwargs)
    y = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
    index = torch.zeros(2, 1, dtype=torch.int32, device=device)
    ones = torch.ones(2, 1, device=device)
    with refused("post_reorder_deepgemm", "routed_scaling_factor"):
        torch.ops.dgmoe.post_reorder_deepgemm(y, index, ones, routed_scaling_factor=factor)


def test_extreme_factors(device):
    """What float32 holds is multiplied by, up to the ends of its normal numbers."""
    args, kwargs = layer_inputs(8, 4, 2, "bf16", device)
    plain = torch.ops.dgmoe.fused_moe(*args, **kwargs)
    for factor in (2.0**100, -(2.0**-100), 2.0**-126, 0.0):
        got = torch.ops.dgmoe.fused_moe(*args, routed_scaling_factor=factor, **kwargs)
        if abs(factor) > 2.0**-120:  # bf16 of a product by a power of two that stays normal
            assert torch.equal(got, plain * factor)
        assert got.isfinite().all() and (factor != 0 or not got.any())


def test_slabs_of_one_row(device):
    """Strides of a size-1 dimension say nothing."""
    y = torch.randn(1, 4, 16).bfloat16().to(device).transpose(0, 1)
    index = torch.arange(4, dtype=torch.int32, device=device)[:, None]
    out = torch.ops.dgmoe.post_reorder_deepgemm(y, index, torch.ones(4, 1, device=device))
    assert torch.equal(out, y[:, 0])


def test_buffers_that_overlap_are_refused(device):
    y = torch.randn(4, 8).bfloat16().to(device)
    index = torch.tensor([[3], [2], [1], [0]], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="out must share no memory with y"):
        torch.ops.dgmoe.post_reorder_deepgemm.out(y, index, torch.ones(4, 1, device=device), out=y)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp4", "bf16"])
def test_a_buffer_over_an_argument_is_refused(recipe, device):
    args, kwargs = layer_inputs(12, 4, 2, recipe, device)
    names = ("hidden_states", "topk_weights", "topk_ids", "w13", "w13_scale", "w2", "w2_scale")
    named = dict(zip(names, args, strict=True))
    named["w13_bias"] = torch.randn(named["w13"].shape[:2], device=device)
    named["w2_bias"] = torch.randn(4, args[0].shape[1], device=device)
    want = torch.ops.dgmoe.fused_moe(**named, **kwargs)
    for arg, tensor in named.items():
        if arg == "hidden_states" or tensor is None:
            continue
        view, out = beside(tensor, want, shared=1)
        for write in (torch.ops.dgmoe.fused_moe.out, dgmoe_ops.fused_moe_inline):
            with pytest.raises(ValueError, match=f"fused_moe: out must share no memory with {arg}"):
                write(**(named | {arg: view}), **kwargs, out=out)
        view, out = beside(tensor, want, shared=0)
        torch.ops.dgmoe.fused_moe.out(**(named | {arg: view}), **kwargs, out=out)
        assert torch.equal(out, want)


@pytest.mark.parametrize("layout", ["masked", "contig"])
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("hidden", [256, 192])
def test_the_buffer_may_be_hidden_states(hidden, recipe, layout, device):
    """Whole, or over a part of it: its rows are placed before the result is written."""
    (x, *rest), kwargs = layer_inputs(12, 4, 2, recipe, device, hidden)
    kwargs["layout"] = layout
    want = torch.ops.dgmoe.fused_moe(x, *rest, **kwargs)
    for write in (torch.ops.dgmoe.fused_moe.out, dgmoe_ops.fused_moe_inline):
        same = x.clone()
        write(same, *rest, **kwargs, out=same)
        assert torch.equal(same, want)
        view, out = beside(x, want, shared=3)
        write(view, *rest, **kwargs, out=out)
        assert torch.equal(out, want)


def test_prepared_weights_of_parameters(device):
    w13 = torch.nn.Parameter(torch.randn(2, 128, 64, device=device).bfloat16())
    w2 = torch.nn.Parameter(torch.randn(2, 64, 64, device=device).bfloat16())
    prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, "bf16")
    assert not prepared.w13.requires_grad and not prepared.w2.requires_grad
    assert prepared == prepared and copy.deepcopy(prepared) != prepared
    with pytest.raises(ValueError, match="w2 must be on the device of w13"):
        dgmoe_ops.prepare_weights(w13, None, w2.to("meta"), None, "bf16")
