"""Every activation, layout, group size, scale form, column order and bias against the oracle."""

import pytest
import torch
from helpers import BF16, bits, int32, op, random_bf16, refused, same_bits
from hypothesis import given, settings
from hypothesis.strategies import data

from dgmoe_ops import reference
from dgmoe_ops.testing import approximate, compare
from dgmoe_ops.testing.samples import SAMPLES

WIDTHS = (32, 128, 192, 576, 704, 2880)
ACTS = {
    "silu": ("silu_and_mul", {}),
    "limit": ("silu_and_mul", {"swiglu_limit": 1.5}),
    "oai": ("silu_and_mul", {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}),
    "situ": ("situ_and_mul", {"beta": 4.0, "linear_beta": 25.0}),
}
FAMILIES = ("silu_and_mul", "situ_and_mul")
SUFFIXES = ("", "_post_quant_masked", "_post_quant_contig")
each_act = pytest.mark.parametrize("act", ACTS)
each_op = pytest.mark.parametrize(
    "name", [family + suffix for family in FAMILIES for suffix in SUFFIXES]
)


def product(act: str, gate: list[float], up: list[float], device, **kwargs) -> torch.Tensor:
    """The bf16 products of these values, as floats."""
    family, parameters = ACTS[act]
    x = torch.tensor([gate + up]).to(BF16).to(device)
    return op(family)(x, **{**parameters, **kwargs})[0].float().cpu()


def near(found: torch.Tensor, expected: list[float]) -> bool:
    return torch.allclose(found, torch.tensor(expected), rtol=2**-8, atol=1e-30)


@each_op
@settings(max_examples=15)
@given(data())
def test_widths_of_models(device, name: str, data) -> None:
    space = {**SAMPLES[name].space, "inter": WIDTHS, "m": (0, 1, 5), "experts": (1, 3)}
    args, kwargs = SAMPLES[name].draw(data.draw, device, space)
    compare.check(name, args, kwargs)


@each_op
def test_exact_on_every_device(device, name: str, monkeypatch) -> None:
    """With DGMOE_EXACT_ACTIVATION=1 a GPU gives the bits of the CPU."""
    monkeypatch.setenv("DGMOE_EXACT_ACTIVATION", "1")
    for seed, case in enumerate(SAMPLES[name].edge_cases):
        args, kwargs = SAMPLES[name].build(device, seed=seed, **case)
        found = compare.outputs(op(name)(*args, **kwargs))
        compare.assert_matches(name, found, args, kwargs)
        args, kwargs = SAMPLES[name].build("cpu", seed=seed, **case)
        expected = compare.outputs(op(name)(*args, **kwargs))
        masks = reference.defined(name)(*args, **kwargs)
        for one, other, mask in zip(found, expected, masks, strict=True):
            compare.assert_bits(name, one, other, mask)


@each_act
@pytest.mark.parametrize("form", [1, 2])
def test_of_ten_thousand_values_one_is_off(device, act: str, form: int) -> None:
    """On a GPU by default: enough values that the bound counts."""
    family, parameters = ACTS[act]
    args = (random_bf16((256, 4096), device) * 3, None)
    kwargs = {"scale_layout": form, **parameters}
    compare.check(family + "_post_quant_contig", args, kwargs)


# ---- worked by hand ----


def test_oai_worked(device) -> None:
    # sigmoid(1.702) = 0.845796, sigmoid(-1.702) = 0.154204, sigmoid(11.914) = 0.9999933
    found = product("oai", [1.0, -1.0, 10.0, 7.0, -10.0], [2.0, 0.5, -10.0, 9.0, 1.0], device)
    assert near(found, [2.537388, -0.231306, -41.99972, 55.999626, -8.1252e-7])


def test_silu_with_a_limit_worked(device) -> None:
    # silu(1.5) = 1.226362, silu(-4) = -0.0719448
    found = product("limit", [1.5, 2.0, -4.0, 1.5], [1.0, 3.0, -3.0, -1.5], device)
    assert near(found, [1.226362, 1.839543, 0.107917, -1.839543])


def test_situ_worked(device) -> None:
    # 4 tanh(.5) sigmoid(2) 25 tanh(.12); a saturated gate; the up saturates at 25
    found = product("situ", [2.0, 400.0, -0.0, 400.0], [3.0, 25.0, 5.0, 1e5], device)
    assert near(found, [4.860964, 76.159416, 0.0, 100.0])


@each_act
def test_nan_stays_nan(device, act: str) -> None:
    nan = float("nan")
    assert product(act, [nan, 1.0, nan], [1.0, nan, nan], device).isnan().all()


@pytest.mark.parametrize("act", ["limit", "oai"])
def test_a_limit_bounds_infinity(device, act: str) -> None:
    limit = 1.5 if act == "limit" else 7.0
    inf = float("inf")
    found = product(act, [inf, 2.0, 2.0], [1.0, inf, -inf], device)
    assert same_bits(found, product(act, [limit, 2.0, 2.0], [1.0, limit, -limit], device))


def test_without_a_limit_infinity_goes_through(device) -> None:
    inf = float("inf")
    for parameters in ({}, {"gemm1_alpha": 1.702}):
        found = product("silu", [inf, 2.0], [1.0, -inf], device, **parameters)
        assert found.tolist() == [inf, -inf]
    assert product("silu", [-inf], [1.0], device).isnan().all()


def test_situ_bounds_infinity(device) -> None:
    inf = float("inf")
    assert near(product("situ", [inf, -inf], [inf, 1.0], device), [100.0, -0.0])


def test_alpha_one_without_a_limit_is_silu(device) -> None:
    x = random_bf16((5, 64), device)
    shifted = x.clone()
    shifted[:, 32:] = (x[:, 32:].float() * 4).round() / 4  # so that up + 1 is exact in bf16
    plain = shifted.clone()
    plain[:, 32:] += 1
    assert same_bits(op("silu_and_mul")(shifted, gemm1_alpha=1.0), op("silu_and_mul")(plain))


# ---- columns and bias ----


def take_turns(x: torch.Tensor, gate_up_interleave: int) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    chunks = [half.unflatten(-1, (-1, gate_up_interleave)) for half in (gate, up)]
    return torch.stack(chunks, -2).flatten(-3).contiguous()


@each_act
@pytest.mark.parametrize("gate_up_interleave", [1, 8])
@pytest.mark.parametrize("inter", [8, 96, 704])
def test_columns_that_take_turns(device, act: str, gate_up_interleave: int, inter: int) -> None:
    family, parameters = ACTS[act]
    x = random_bf16((9, 2 * inter), device)
    turned = take_turns(x, gate_up_interleave)
    found = op(family)(turned, gate_up_interleave=gate_up_interleave, **parameters)
    assert same_bits(found, op(family)(x, **parameters))
    quantised = op(family + "_post_quant_contig")
    for one, other in zip(
        quantised(turned, gate_up_interleave=gate_up_interleave, **parameters),
        quantised(x, **parameters),
        strict=True,
    ):
        assert same_bits(one, other)


@each_act
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("inter", [7, 40])
def test_a_bias_is_added_before(device, act: str, dtype: torch.dtype, inter: int) -> None:
    """Values in quarters, whose sums bf16 holds."""
    family, parameters = ACTS[act]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randint(-8, 9, (12, 2 * inter), generator=generator) / 4).to(BF16).to(device)
    bias = (torch.randint(-8, 9, (3, 2 * inter), generator=generator) / 4).to(dtype).to(device)
    m_indices = int32([0, 0, 2, -1, 1, 1, 1, -1, 2, 2, 2, 2], device)
    summed = (x + bias[m_indices.clamp(min=0).long()].to(BF16)).contiguous()
    valid = (m_indices >= 0).cpu()
    found = op(family)(x, m_indices=m_indices, bias=bias, **parameters)
    expected = op(family)(summed, m_indices=m_indices, **parameters)
    assert same_bits(found.cpu()[valid], expected.cpu()[valid])
    slab, counts = x.view(3, 4, 2 * inter), int32([4, 0, 3], device)
    q, scale = op(family + "_post_quant_masked")(slab, counts, bias=bias, **parameters)
    summed = (slab + bias[:, None].to(BF16)).contiguous()
    want_q, want_scale = op(family + "_post_quant_masked")(summed, counts, **parameters)
    for e, count in enumerate([4, 0, 3]):
        assert same_bits(q[e, :count], want_q[e, :count])
        assert same_bits(scale[e, :count], want_scale[e, :count])


def test_a_bias_is_added_in_fp32(device) -> None:
    x = torch.tensor([[100.0, 256.0]]).to(BF16).to(device)
    bias = torch.tensor([[0.0, 0.75]], device=device)  # 256.75 is no bf16
    found = op("silu_and_mul")(x, m_indices=int32([0], device), bias=bias)
    assert found.item() == torch.tensor(100 * 256.75).to(BF16).item() != 25600.0


def test_an_expert_past_the_bias_has_none(device) -> None:
    x, bias = random_bf16((2, 16), device), torch.ones(1, 16, device=device)
    found = op("silu_and_mul")(x, m_indices=int32([0, 7], device), bias=bias)
    assert same_bits(found[1], op("silu_and_mul")(x)[1])
    assert not same_bits(found[0], op("silu_and_mul")(x)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_count_past_the_slab_means_all_of_it(device, family: str) -> None:
    parameters = {} if family == "silu_and_mul" else ACTS["situ"][1]
    x = random_bf16((2, 5, 64), device)
    call = op(family + "_post_quant_masked")
    capped = call(x, int32([2**31 - 1, 5], device), **parameters)
    for one, other in zip(capped, call(x, int32([5, 5], device), **parameters), strict=True):
        assert same_bits(one, other)


def test_situ_is_quantised_with_the_scale_that_is_stored(device) -> None:
    x = random_bf16((40, 512), device)
    parameters = ACTS["situ"][1]
    q, packed = op("situ_and_mul_post_quant_contig")(x, scale_layout=2, **parameters)
    scale = torch.ops.dgmoe.unpack_ue8m0(packed, 2).double().repeat_interleave(128, 1)
    g, u = x.double().chunk(2, -1)
    exact = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    assert ((q.double() * scale - exact).abs() <= exact.abs() * 2.0**-4 + scale * 2.0**-10).all()


# ---- refusals ----


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_refused_parameters(device, suffix: str) -> None:
    slab = random_bf16((2, 3, 16), device)
    args = (slab, int32([1, 2], device)) if suffix != "_post_quant_contig" else (slab[0],)
    silu, situ = "silu_and_mul" + suffix, "situ_and_mul" + suffix
    inf = float("inf")
    for limit in (0.0, -1.0, inf, float("nan"), 1e39, 1e-39, 1e-46):
        with refused(silu, "swiglu_limit"):
            op(silu)(*args, swiglu_limit=limit)
        with refused(silu, "gemm1_clamp_limit"):
            op(silu)(*args, gemm1_alpha=1.0, gemm1_clamp_limit=limit)
        with refused(situ, "beta"):
            op(situ)(*args, beta=limit, linear_beta=1.0)
        with refused(situ, "linear_beta"):
            op(situ)(*args, beta=1.0, linear_beta=limit)
    for alpha in (inf, float("nan"), 1e39, 1e-39, -1e-46):
        with refused(silu, "gemm1_alpha"):
            op(silu)(*args, gemm1_alpha=alpha)
    with refused(silu, "gemm1_clamp_limit"):
        op(silu)(*args, gemm1_clamp_limit=7.0)
    with refused(silu, "swiglu_limit"):
        op(silu)(*args, gemm1_alpha=1.0, swiglu_limit=7.0)


@each_op
def test_refused_columns(device, name: str) -> None:
    slab = random_bf16((2, 3, 24), device)
    masked = not name.endswith("contig")
    args = (slab, int32([1, 2], device)) if masked else (slab[0], int32([0, 1, -1], device))
    parameters = {} if name.startswith("silu") else ACTS["situ"][1]
    call = op(name)
    for gate_up_interleave in (2, -1, 16):
        with refused(name, "gate_up_interleave"):
            call(*args, gate_up_interleave=gate_up_interleave, **parameters)
    with refused(name, "gate_up"):
        call(*args, gate_up_interleave=8, **parameters)
    bias = torch.zeros(2, 24, device=device)
    for bad in (bias.double(), bias[0], bias[:, :23]):
        with refused(name, "bias"):
            call(*args, bias=bad, **parameters)
    if masked:
        with refused(name, "bias"):
            call(*args, bias=bias[:1], **parameters)
    else:
        with refused(name, "m_indices"):
            call(slab[0], bias=bias, **parameters)


# ---- the bound of the approximation ----


def quantised() -> tuple:
    x = random_bf16((64, 1024), torch.device("cpu"))
    q, scale = op("silu_and_mul_post_quant_contig")(x)
    masks = tuple(torch.ones(t.shape, dtype=torch.bool) for t in (q, scale))
    return q, scale, masks


def test_the_bound_lets_few_steps_pass() -> None:
    q, scale, masks = quantised()
    one = bits(q).clone()
    one.view(-1)[77] += 1 if one.view(-1)[77] & 0x7F < 0x7E else -1
    nudged = scale * (1 + 1e-6)
    one = one.view(q.dtype)
    approximate.assert_quantised("op", (one, nudged), (q, scale), masks)


def test_the_bound_holds_the_rest() -> None:
    q, scale, masks = quantised()
    many = bits(q).clone()
    flat = many.view(-1)
    flat[:10] = torch.where(flat[:10] % 0x80 < 0x7E, flat[:10] + 1, flat[:10] - 1)
    far = bits(q).clone()
    far.view(-1)[5] = far.view(-1)[5] ^ 0x40
    broken = scale.clone()
    broken[3, 1] = float("nan")
    for bad in ((many.view(q.dtype), scale), (far.view(q.dtype), scale), (q, scale * 1.001)):
        with pytest.raises(AssertionError, match="off|step"):
            approximate.assert_quantised("op", bad, (q, scale), masks)
    with pytest.raises(AssertionError, match="NaN"):
        approximate.assert_quantised("op", (q, broken), (q, scale), masks)
