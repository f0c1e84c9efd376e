import pytest
import torch
from helpers import BF16, check_random, int32, misaligned, random_bf16, refused, same_bits, strided
from hypothesis import given
from hypothesis.strategies import data

from dgmoe_ops.reference.activation import flushed_activation

silu = torch.ops.dgmoe.silu_and_mul
NAME = "silu_and_mul"


@given(data())
def test_random(device, data) -> None:
    check_random(NAME, data.draw, device)


def test_worked_values(device) -> None:
    gate = torch.tensor([0.0, 1.0, -1.0, 100.0, -200.0, float("inf")])
    up = torch.tensor([5.0, 2.0, 2.0, 0.5, 3.0, 1.0])
    out = silu(torch.cat([gate, up])[None].to(BF16).to(device))
    # silu(1) = 0.7310586, silu(-1) = -0.2689414
    expected = torch.tensor([[0.0, 1.4621172, -0.5378828, 50.0, -0.0, float("inf")]]).to(BF16)
    assert same_bits(out.cpu() + 0.0, expected + 0.0)


def test_rounds_once(device) -> None:
    """For every gate: half a step of bf16 from the exact value, and next to nothing for fp32."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(BF16)
    gate = every[every.isfinite()].reshape(-1, 1)
    found = silu(torch.cat([gate, torch.ones_like(gate)], dim=1).to(device)).cpu().double()
    wide = gate.double()
    exact = wide / (1 + torch.exp(-wide))
    # Where e^-x leaves fp32, or on a GPU its reciprocal does, the result is a zero.
    flushed = 3e-37 if device.type == "cpu" else 2.0**-119
    assert ((found - exact).abs() <= exact.abs() * (2.0**-8 * 1.001) + flushed).all()


def test_the_layouts_agree(device) -> None:
    x = random_bf16((3, 20, 128), device)
    masked_m = int32([20, 0, 7], device)
    slab = silu(x, masked_m)
    flat = silu(x.flatten(0, 1)).view_as(slab)
    m_indices = torch.where(torch.arange(20, device=device) < masked_m[:, None], 1, -1).int()
    contig = silu(x.flatten(0, 1), None, m_indices.flatten()).view_as(slab)
    for e, count in enumerate(masked_m.tolist()):
        assert same_bits(slab[e, :count], flat[e, :count])
        assert same_bits(contig[e, :count], flat[e, :count])


def test_padding_reaches_no_result(device) -> None:
    x, masked_m = random_bf16((2, 9, 64), device), int32([4, 9], device)
    expected = silu(x, masked_m)
    x[0, 4:] = float("nan")
    found = silu(x, masked_m)
    assert same_bits(found[0, :4], expected[0, :4]) and same_bits(found[1], expected[1])


def test_views_do_not_matter(device) -> None:
    x = random_bf16((6, 70), device)
    expected = silu(x)
    for view in (strided(x), misaligned(x), x.t().contiguous().t()):
        assert same_bits(silu(view), expected)
    slab = random_bf16((2, 6, 70), device)
    masked_m = int32([6, 6], device)
    assert same_bits(silu(strided(slab), masked_m), silu(slab, masked_m))
    turned = slab.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(silu(turned, masked_m), silu(slab, masked_m))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_empty(device, shape) -> None:
    x = torch.zeros(shape, dtype=BF16, device=device)
    masked_m = None if len(shape) == 2 else int32([0] * shape[0], device)
    assert silu(x, masked_m).shape == (*shape[:-1], shape[-1] // 2)


def test_refusals(device) -> None:
    x, slab = random_bf16((4, 8), device), random_bf16((2, 4, 8), device)
    masked_m, m_indices = int32([1, 2], device), int32([0, 0, 0, -1], device)
    for bad in (x.float(), x[0], x[:, :7], slab):
        with refused(NAME, "gate_up"):
            silu(bad)
    with refused(NAME, "gate_up"):
        silu(x, masked_m)
    for bad in (masked_m.long(), masked_m[:1], masked_m[None], strided(masked_m)):
        with refused(NAME, "masked_m"):
            silu(slab, bad)
    for bad in (m_indices.long(), m_indices[:3], m_indices[None], strided(m_indices)):
        with refused(NAME, "m_indices"):
            silu(x, None, bad)
    with refused(NAME, "m_indices"):
        silu(slab, masked_m, m_indices)


def test_what_a_gpu_may_lose_of_a_bias_without_experts() -> None:
    """The bound of an approximation, asked for where there is nothing to approximate."""
    lost = flushed_activation(torch.zeros(0, 2, 8).bfloat16(), bias=torch.zeros(0, 8))
    assert lost.shape == (0, 2, 4)
