"""Weight preparation: padding, idempotence, targets, refusals."""

import pytest
import torch

import dgmoe_ops


def experts(n, hidden, inter, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(n + hidden)
    w13 = torch.randn(n, 2 * inter, hidden, generator=g).to(dtype)
    return w13, torch.randn(n, hidden, inter, generator=g).to(dtype)


def test_padding_keeps_gate_and_up_apart():
    w13, w2 = experts(3, 200, 72)
    prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, "bf16")
    assert prepared.w13.shape == (3, 2 * 128, 256) and prepared.w2.shape == (3, 200, 128)
    prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, "fp8_block")
    assert prepared.w13.shape == (3, 2 * 128, 256) and prepared.w2.shape == (3, 200, 128)
    assert prepared.w13_scale.shape == (3, 2, 2) and prepared.w2_scale.shape == (3, 2, 1)
    bytes13 = prepared.w13.view(torch.uint8)
    assert (bytes13[:, 72:128] == 0).all() and (bytes13[:, 200:] == 0).all()
    assert (bytes13[:, :, 200:] == 0).all()
    values = prepared.w13.float().view(3, 2, 128, 2, 128) * prepared.w13_scale.view(3, 2, 1, 2, 1)
    dense = values.view(3, 2, 128, 256)[:, :, :72, :200].reshape(3, 144, 200)
    assert (dense - w13.float()).norm() / w13.float().norm() < 0.04


@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100", "sm120"])
def test_targets_and_idempotence(target):
    w13, w2 = experts(2, 576, 128)
    prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, "fp8_block", target)
    packed = target in ("sm100", "sm120")
    assert prepared.w13_scale.dtype == (torch.int32 if packed else torch.float32)
    if packed:
        assert prepared.w13_scale.shape == (2, 256, 2) and prepared.w13_scale.stride()[1] == 1
    assert dgmoe_ops.prepare_weights(prepared, recipe="fp8_block", target=target) is prepared
    other = "cpu" if packed else "sm100"
    with pytest.raises(ValueError, match="w13 must be prepared for"):
        dgmoe_ops.prepare_weights(prepared, recipe="fp8_block", target=other)


def test_fp8_checkpoints_keep_their_bytes_or_are_requantised():
    w13, w2 = experts(2, 256, 128)
    once = dgmoe_ops.prepare_weights(w13, None, w2, None, "fp8_block", "sm90")
    again = dgmoe_ops.prepare_weights(*once.tensors, "fp8_block", "sm90")
    for a, b in zip(once.tensors, again.tensors, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    packed = dgmoe_ops.prepare_weights(*once.tensors, "fp8_block", "sm100")
    scale = dgmoe_ops.ops.unpack_ue8m0(packed.w13_scale, 2).repeat_interleave(128, 2)
    dense = packed.w13.float() * scale
    assert (dense - w13.float()).norm() / w13.float().norm() < 0.06


@pytest.mark.parametrize(
    "spoil,message",
    [
        (lambda a: a.update(recipe="int3"), "recipe must be one of"),
        (lambda a: a.update(target="sm80"), "target must be one of"),
        (lambda a: a.update(w2=None), "w2 must be given"),
        (lambda a: a.update(w2=a["w2"][:, :-1]), "w2 must have shape"),
        (lambda a: a.update(w13=a["w13"].half()), "w13 must be one of"),
        (lambda a: a.update(w13=a["w13"][0]), "w13 must have three dimensions"),
        (lambda a: a.update(w13_scale=torch.ones(1)), "w13_scale must be given for"),
        (lambda a: a.update(w2=a["w2"].to(torch.float8_e4m3fn)), "w2_scale must be given for"),
    ],
)
def test_bad_input(spoil, message):
    w13, w2 = experts(2, 64, 32)
    arguments = {"w13": w13, "w13_scale": None, "w2": w2, "w2_scale": None}
    spoil(arguments)
    with pytest.raises(ValueError, match=message):
        dgmoe_ops.prepare_weights(**arguments)
