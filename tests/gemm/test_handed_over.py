"""What the layer would hand to DeepGEMM on Blackwell, tensor by tensor, against what it documents.

The layer runs on the CPU with weights prepared for the target; each of its GEMMs is also sent
through the adapter to a stand-in library on a pretended device.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from deep_gemm_stand_in import Library, mx_request
from deep_gemm_stand_in import pretend as pretend
from helpers import replace_gemms

import dgmoe_ops
from dgmoe_ops.backends import deep_gemm, platforms
from dgmoe_ops.backends.deep_gemm import library, switches
from dgmoe_ops.backends.request import Operands, request_of
from dgmoe_ops.formats.layouts import Layout
from dgmoe_ops.layer import checks
from dgmoe_ops.layer import fused_moe as layer
from dgmoe_ops.layer.device import Device

ALL_NAMES = tuple(dict.fromkeys(names[0] for names in library.FUNCTION_NAMES.values()))
TMA_BYTES = 16


def aligned(rows: int, element: int) -> int:
    return -(-rows * element // TMA_BYTES) * TMA_BYTES // element


def assert_operand(x: torch.Tensor) -> None:
    """K-major, and experts one behind the other."""
    assert x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
    if x.dim() == 3:
        assert x.stride(0) == x.shape[1] * x.shape[2]
    assert x.data_ptr() % TMA_BYTES == 0


def assert_packed(sf: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int, batch) -> None:
    """int32, MN-major, columns on 16 bytes; size-1 dimensions are not let off."""
    assert sf.dtype == torch.int32
    assert sf.dim() == (2 if batch is None else 3)
    assert sf.shape[-2] == -(-mn // gran_mn)
    assert sf.shape[-1] == -(-k // (gran_k * 4))
    leading = aligned(sf.shape[-2], 4)
    assert sf.stride(-1) == leading, (sf.shape, sf.stride())
    assert sf.stride(-2) == 1 or mn == 1
    if batch is not None:
        assert sf.shape[0] == batch and sf.stride(0) == leading * sf.shape[-1]


#: recipe -> what is named to the library, whose default is (1, 128) twice
NAMED = {"mxfp8": ((1, 32), (1, 32)), "mxfp4": ((1, 128), (1, 32))}


def assert_documented(name: str, args: tuple, kwargs: dict, recipe: str = "") -> None:
    """The asserts of a grouped GEMM call with packed scales."""
    a, b, d, info, *expected_m = args
    masked = "masked" in name
    scaled = isinstance(a, tuple)
    (a, a_sf), (b, b_sf) = (a, b) if scaled else ((a, None), (b, None))
    assert_operand(a)
    assert_operand(b)
    assert d.dtype == torch.bfloat16 and d.is_contiguous()
    assert info.dtype == torch.int32 and info.is_contiguous() and info.dim() == 1
    experts, n, _ = b.shape
    m, k = a.shape[-2:]
    fp4 = recipe == "mxfp4"
    assert experts > 0 and n > 0 and k > 0 and m > 0 and b.shape[-1] == (k // 2 if fp4 else k)
    assert not fp4 or k % 128 == 0
    assert d.shape == (*a.shape[:-1], n)
    assert len(expected_m) == masked and all(value > 0 for value in expected_m)
    assert info.shape == ((experts,) if masked else (m,))
    assert masked or m % 128 == 0
    assert a.dtype == (torch.float8_e4m3fn if scaled else torch.bfloat16)
    assert b.dtype == (torch.int8 if fp4 else a.dtype)
    named = NAMED.get(recipe)
    assert kwargs == ({"recipe_a": named[0], "recipe_b": named[1]} if named else {})
    if scaled:
        (_, columns_a), (_, columns_b) = named or ((1, 128), (1, 128))
        assert_packed(a_sf, m, k, 1, columns_a, experts if masked else None)
        assert_packed(b_sf, n, k, 1, columns_b, experts)


def through_adapter(name: str, real):
    """The layer's GEMM, which also sends its operands through the adapter."""
    scaled = "f8f8" in name

    def gemm(*args, recipe_a=None, recipe_b=None):
        d = real(*args, recipe_a=recipe_a, recipe_b=recipe_b) if scaled else real(*args)
        a, a_scale, b, b_scale = args[:4] if scaled else (args[0], None, args[1], None)
        info, *expected_m = args[4:] if scaled else args[2:]
        out = torch.empty_like(d)
        operands = Operands(a, a_scale, b, b_scale, info, out)
        named = {"granularity_a": recipe_a, "granularity_b": recipe_b}
        hint = expected_m[0] if expected_m else 0
        deep_gemm.run(request_of(name, operands, expected_m=hint, **named))
        return d

    return gemm


CELLS = [
    (arch, recipe, layout)
    for arch in (100, 103, 120, 121)
    for recipe in platforms.RECIPES
    for layout in platforms.layouts_of(arch, recipe)
]


@pytest.mark.parametrize(("hidden", "inter"), [(256, 128), (576, 192), (7168, 128)])
@pytest.mark.parametrize(("arch", "recipe", "layout"), CELLS)
def test_blackwell_gets_what_it_documents(
    pretend, monkeypatch, device, arch, recipe, layout, hidden, inter
) -> None:
    if device.type == "cuda":
        pytest.skip("a stand-in takes CPU tensors")
    handed = pretend(Library(*ALL_NAMES), arch // 10)
    experts, tokens, top_k = 3, 5, 2
    g = torch.Generator().manual_seed(0)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=g).bfloat16()
    w2 = torch.randn(experts, hidden, inter, generator=g).bfloat16()
    target = platforms.platform_of(arch).target
    prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, recipe=recipe, target=target)
    replace_gemms(monkeypatch, through_adapter)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.tensor([[0, 1]] * tokens)  # expert 2 has no token
    weights = torch.rand(tokens, top_k, generator=g)
    dgmoe_ops.fused_moe_inline(x, weights, ids, *prepared.tensors, recipe=recipe, layout=layout)
    calls = [call for call in handed.calls if "grouped" in call[0]]
    assert len(calls) == 2  # both GEMMs
    for call in calls:
        assert_documented(*call, recipe)


SCOPES = {
    "num_sms": lambda: dgmoe_ops.num_sms(24),
    "pdl": lambda: dgmoe_ops.pdl(True),
    "contiguous_alignment": lambda: dgmoe_ops.contiguous_alignment(64),
}


@pytest.mark.parametrize("scope", [None, *SCOPES])
@pytest.mark.parametrize("arch", [100, 103, 120, 121])
def test_auto_hands_over_what_runs_in_every_scope(pretend, monkeypatch, arch, scope) -> None:
    names = [name for switch in switches.SWITCHES.values() for name in switch]
    handed = pretend(Library(*ALL_NAMES, *names), arch // 10)
    monkeypatch.setattr(checks, "_known", {})
    for module in (checks, layer):
        monkeypatch.setattr(module, "device_of", lambda device: Device(arch, 80 << 30))
    replace_gemms(monkeypatch, through_adapter)
    target = platforms.platform_of(arch).target
    g = torch.Generator().manual_seed(0)
    w13 = torch.randn(3, 256, 256, generator=g).bfloat16()
    w2 = torch.randn(3, 256, 128, generator=g).bfloat16()
    x = torch.randn(5, 256, generator=g).bfloat16()
    ids = torch.tensor([[0, 1]] * 5)  # expert 2 has no token
    for recipe in platforms.RECIPES:
        legal = platforms.layouts_of(arch, recipe)
        if not legal:
            continue
        prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, recipe=recipe, target=target)
        handed.calls.clear()
        with SCOPES[scope]() if scope else contextlib.nullcontext():
            dgmoe_ops.fused_moe_inline(x, torch.ones(5, 2), ids, *prepared.tensors, recipe=recipe)
        calls = [call for call in handed.calls if "grouped" in call[0]]
        assert len(calls) == 2
        for call in calls:
            assert ("masked" in call[0]) == (Layout.MASKED in legal)
            assert_documented(*call, recipe)


@pytest.mark.parametrize("arch_major", [10, 12])
def test_fp4_is_refused_where_the_library_would(pretend, arch_major) -> None:
    """Its rows come in tensor maps of 128 values, and its default granularity is another."""
    pretend(Library(*ALL_NAMES), arch_major)
    op = "grouped_gemm_nt_f8f8bf16_contig"
    deep_gemm.run(mx_request(op, "mxfp4"))
    with pytest.raises(ValueError, match=f"{op}: k must be a multiple of 128 for int8 b.*got 192"):
        deep_gemm.run(mx_request(op, "mxfp4", k=192))
    deep_gemm.run(mx_request(op, "mxfp8", k=192))


def test_hopper_has_no_mx_in_the_library(pretend) -> None:
    pretend(Library(*ALL_NAMES), 9)
    for recipe in NAMED:
        made = mx_request("grouped_gemm_nt_f8f8bf16_contig", recipe)
        with pytest.raises(ValueError, match="must be .* on SM90.*, got"):
            deep_gemm.run(made)


def test_the_asserts_can_fail() -> None:
    for strides in ((256, 1, 1), (256, 1, 255), (512, 1, 256)):
        scale = torch.empty_strided((4, 256, 1), strides, dtype=torch.int32)
        with pytest.raises(AssertionError):
            assert_packed(scale, 256, 256, 1, 128, 4)
    assert_packed(scale.as_strided((4, 256, 1), (256, 1, 256)), 256, 256, 1, 128, 4)
