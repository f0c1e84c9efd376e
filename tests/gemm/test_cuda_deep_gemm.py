"""What only a GPU shows of the adapter: direct calls, cold captures, scopes, host-side refusals."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import dgmoe_ops
from dgmoe_ops import reference
from dgmoe_ops.backends import deep_gemm
from dgmoe_ops.backends.deep_gemm import library, native
from dgmoe_ops.backends.request import OPS
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.samples import SAMPLES

GEMMS = [op for op in OPS if op != "gemm_nt_mxfp8_f8f8bf16"]  # SM90 has no (1, 32) scales


@pytest.fixture(autouse=True)
def needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")


def op(name):
    return getattr(torch.ops.dgmoe, name)


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def dense(device, m=64, n=128, k=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = (torch.randn(rows, k, generator=g).bfloat16().to(device) for rows in (m, n))
    return tuple(make)


@pytest.mark.parametrize("name", GEMMS)
def test_a_second_call_gives_the_bits_of_the_first(name, device):
    """The first goes through Python, the second, where the release allows it, does not."""
    args, kwargs = SAMPLES[name].tiny(device)
    first = outputs(op(name)(*args, **kwargs))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        second = outputs(op(name)(*args, **kwargs))
    names = {event.key for event in profile.key_averages()}
    if name in native._bound and deep_gemm.versions.binding(deep_gemm.version()) == "tvm-ffi":
        assert "dgmoe::_gemm_run" not in names, "a warm call went through Python"
    masks = reference.defined(name)(*args, **kwargs)
    for one, other, mask in zip(first, second, masks, strict=True):
        compare.assert_bits(name, one, other, mask)


COLD = """
import torch, dgmoe_ops
a, b = (torch.randn(64, 256, device="cuda").bfloat16() for _ in range(2))
stream = torch.cuda.Stream()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        torch.ops.dgmoe.gemm_nt_bf16bf16f32(a, b)
except RuntimeError as error:
    text = str(error)
    assert "dgmoe::gemm_nt_bf16bf16f32: this shape must have run before" in text, text
    assert "m=64, n=64, k=256" in text and "dgmoe_ops.warmup(" in text, text
else:
    raise AssertionError("captured a cold shape")
import sys
assert "deep_gemm" not in sys.modules, "the library was loaded inside a capture"
torch.cuda.synchronize()
want = torch.ops.dgmoe.gemm_nt_bf16bf16f32(a, b)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = torch.ops.dgmoe.gemm_nt_bf16bf16f32(a, b)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(got, want)
print("as it should be")
"""


def test_a_cold_shape_is_not_captured(device):
    """It raises with the call to make beforehand, loads nothing, and runs once it is warm."""
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=300)
    assert "as it should be" in done.stdout, done.stdout + done.stderr


PYTHON_ONLY = """
import torch, dgmoe_ops
from dgmoe_ops.backends.deep_gemm import native
g = torch.Generator().manual_seed(1)
a, b = (torch.randn(64, 256, generator=g).bfloat16().cuda() for _ in range(2))
for _ in range(3):
    d = torch.ops.dgmoe.gemm_nt_bf16bf16f32(a, b)
torch.save(d.cpu(), {path!r})
"""


def test_direct_calls_can_be_turned_off(device, tmp_path):
    """Through Python only, the bits are the same."""
    path = str(tmp_path / "d.pt")
    environment = {**os.environ, "DGMOE_NATIVE_CALLS": "0"}
    code = PYTHON_ONLY.format(path=path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, 256, generator=g).bfloat16().cuda() for _ in range(2))
    for _ in range(3):
        d = torch.ops.dgmoe.gemm_nt_bf16bf16f32(a, b)
    assert torch.equal(d.cpu(), torch.load(path))


def test_scopes_reach_the_library(device):
    a, b = dense(device, 300, 512, 1024)
    want = op("gemm_nt_bf16bf16f32")(a, b)
    module = library.proven(device)
    sms, pdl = module.get_num_sms(), module.get_pdl()
    with dgmoe_ops.num_sms(32), dgmoe_ops.pdl(not pdl):
        assert torch.equal(op("gemm_nt_bf16bf16f32")(a, b), want)
    assert (module.get_num_sms(), module.get_pdl()) == (sms, pdl)
    with pytest.raises(ValueError, match="num_sms must be at most"), dgmoe_ops.num_sms(100_000):
        op("gemm_nt_bf16bf16f32")(a, b)
    assert module.get_num_sms() == sms
    assert torch.equal(op("gemm_nt_bf16bf16f32")(a, b), want)


def test_overlap_says_what_the_library_lacks(device):
    signal = torch.zeros(8, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="overlap of the down GEMM is not available: .* takes"):
        deep_gemm.down_gemm_overlap(signal).__enter__()


def test_other_recipes_are_refused(device):
    args, kwargs = SAMPLES["gemm_nt_mxfp8_f8f8bf16"].tiny(device)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    with pytest.raises(ValueError, match="gemm_nt_mxfp8_f8f8bf16: recipe_a and recipe_b must be"):
        op("gemm_nt_mxfp8_f8f8bf16")(*args, **kwargs)


def test_errors_keep_their_words_and_kind(device):
    """An error crosses from Python to C++ and back."""
    a, b = dense(device, k=96)
    with pytest.raises(ValueError, match="gemm_nt_bf16bf16f32: k must be a multiple of 64 on CUDA"):
        op("gemm_nt_bf16bf16f32")(a, b)


def test_sanity_mode_names_the_element(device, monkeypatch):
    args, kwargs = SAMPLES["grouped_gemm_nt_bf16_masked"].tiny(device)
    a, b, masked_m, expected_m = args
    op("grouped_gemm_nt_bf16_masked")(*args, **kwargs)
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "1")
    op("grouped_gemm_nt_bf16_masked")(*args, **kwargs)
    bad = masked_m.clone()
    bad[0] = a.shape[1] + 1
    with pytest.raises(
        ValueError, match=r"masked_m must hold between 0 and .* rows, got .* at \[0\]"
    ):
        op("grouped_gemm_nt_bf16_masked")(a, b, bad, expected_m)
