"""MX recipes on SM90: who runs them, what is refused, which tile is chosen."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deep_gemm_stand_in import (
    F8_CONTIG,
    F8_MASKED,
    Library,
    mx_request,
    pretend,  # noqa: F401
    request,
)

from dgmoe_ops.backends import entry, triton
from dgmoe_ops.backends.scopes import Overlap, contiguous_alignment, num_sms, scope
from dgmoe_ops.backends.triton.tiles import choose
from dgmoe_ops.formats.gemm import GroupedGemmSpec
from dgmoe_ops.formats.layout import Layout
from dgmoe_ops.formats.layouts import ScaleLayout

MASKED = "m_grouped_fp8_gemm_nt_masked"
OPS = (F8_MASKED, F8_CONTIG)
RECIPES = ("mxfp8", "mxfp4")


@pytest.fixture
def launched(monkeypatch):
    """Stand in for what compiles and launches; tell what it was asked for."""
    asked: list = []

    class Compiled:
        @staticmethod
        def launcher(*args):
            asked.append(args)
            return lambda *tensors: asked.append(tensors)

        @staticmethod
        def compile_kernel(*args):
            asked.append(args)

    monkeypatch.setattr(triton, "_launchers", {})
    monkeypatch.setattr(triton, "_compiled", lambda: Compiled)
    return asked


# ---- who runs what ----


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_mx_on_sm90_is_tritons(pretend, launched, op, recipe):  # noqa: F811
    library = pretend(Library(MASKED))
    made = mx_request(op, recipe)
    entry.run(made)
    (spec, config, _, sms), tensors = launched
    assert spec == made.spec and spec.fp4 == (recipe == "mxfp4")
    assert config == triton.config_of(spec)
    assert sms is None
    assert len(tensors) == 6 and tensors[-1] is made.operands.d
    for got, given in zip(tensors, made.operands, strict=False):
        assert got.data_ptr() == given.data_ptr()
    assert not library.calls


@pytest.mark.parametrize("arch_major, form", [(9, ScaleLayout.MN_MAJOR), (10, None)])
def test_everything_else_is_deep_gemms(pretend, launched, arch_major, form):  # noqa: F811
    library = pretend(Library(MASKED, "fp8_fp4_gemm_nt"), arch_major)
    entry.run(request() if form is not None else mx_request(F8_MASKED, "mxfp8"))
    assert [name for name, *_ in library.calls if name == MASKED] == [MASKED]
    assert not launched


def test_a_second_call_compiles_nothing(pretend, launched):  # noqa: F811
    pretend(Library(MASKED))
    for _ in range(2):
        entry.run(mx_request(F8_MASKED, "mxfp4"))
    assert [len(x) for x in launched] == [4, 6, 6]
    with num_sms(20):
        entry.run(mx_request(F8_MASKED, "mxfp4"))
    assert launched[3][-1] == 20


# ---- refusals ----


@pytest.mark.parametrize("recipe", RECIPES)
def test_k_in_whole_blocks(pretend, launched, recipe):  # noqa: F811
    pretend(Library(MASKED))
    with pytest.raises(ValueError, match="k must be a multiple of 128 for MX .* on SM90, got 192"):
        entry.run(mx_request(F8_MASKED, recipe, k=192))
    assert not launched


def test_other_forms_are_refused(pretend, launched):  # noqa: F811
    pretend(Library(MASKED))
    made = mx_request(F8_MASKED, "mxfp4")
    plain = made.with_operands(b_scale=made.operands.b_scale.contiguous())
    with pytest.raises(ValueError, match="b_scale must be packed UE8M0 int32, MN-major, on SM90"):
        entry.run(plain)
    with pytest.raises(ValueError, match=r"recipe_a must be \(1, 128\) for int8 b on SM90"):
        entry.run(made.with_spec(granularity_a=(1, 32)))
    with pytest.raises(ValueError, match="a must have a multiple of 128 rows"):
        entry.run(mx_request(F8_CONTIG, "mxfp8", m=192))
    with contiguous_alignment(64), pytest.raises(ValueError, match="alignment must be one of 128"):
        entry.run(mx_request(F8_CONTIG, "mxfp8"))
    assert not launched


@pytest.mark.parametrize("op", OPS)
def test_overlap_is_refused(pretend, launched, op):  # noqa: F811
    pretend(Library(MASKED))
    match = f"dgmoe::{op}: overlap of the down GEMM is not available: this GEMM on SM90"
    signal = torch.zeros(4, dtype=torch.int32)
    with scope(overlap=Overlap(signal)), pytest.raises(RuntimeError, match=match):
        entry.run(mx_request(op, "mxfp8"))
    assert not launched


def test_a_missing_triton_is_named(pretend, monkeypatch):  # noqa: F811
    pretend(Library(MASKED))
    monkeypatch.setattr(triton, "_launchers", {})
    monkeypatch.delitem(sys.modules, "dgmoe_ops.backends.triton.compiled", raising=False)
    monkeypatch.delattr(triton, "compiled", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="not take, needs Triton, .*pip install triton"):
        entry.run(mx_request(F8_MASKED, "mxfp8"))


def test_sanity_mode_names_the_element(pretend, launched, monkeypatch):  # noqa: F811
    pretend(Library(MASKED))
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "1")
    monkeypatch.setattr("dgmoe_ops._sanity.looks_at", lambda tensor: True)
    made = mx_request(F8_CONTIG, "mxfp4")
    made.operands.info[:2] = torch.tensor([1, 0])
    with pytest.raises(ValueError, match=r"one expert in each .*block.* got 0 at \[1\] after 1"):
        entry.run(made)


# ---- tiles ----


def spec_of(layout=Layout.MASKED, fp4=True, k=2048, m=4096, expected_m=7) -> GroupedGemmSpec:
    columns = (1, 128) if fp4 else (1, 32)
    return GroupedGemmSpec(layout, 8, m, 256, k, expected_m, columns, (1, 32), fp4)


def test_tiles_follow_the_rows_that_an_expert_is_expected_to_have():
    assert triton.config_of(spec_of()) == choose(spec_of(), 7)
    contig = spec_of(Layout.CONTIG, expected_m=0)
    for segments, rows in ((7, 1), (8, 15), (24, 257)):
        spec = dataclasses.replace(contig, m=segments * 128)
        assert triton.config_of(spec) == choose(spec, rows)


@pytest.mark.parametrize("fp4", [False, True])
def test_tiles_grow_with_rows(fp4):
    sizes = [choose(spec_of(fp4=fp4), r) for r in (1, 20, 32, 100, 1e9)]
    rows = [tile.block_m for tile in sizes]
    assert rows == sorted(rows) and rows[0] == 16 and rows[-1] == 128
    short = choose(spec_of(fp4=fp4, k=512), 1)
    assert short.stages == 3


def test_compiling_ahead_needs_no_gpu(launched):
    spec = spec_of(expected_m=64)
    triton.compile_for(spec)
    assert launched == [(spec, choose(spec, 64))]


def test_it_is_imported_lazily():
    assert torch.ops.dgmoe._gemm_run is not None
    assert "dgmoe_ops.backends.triton.kernel" not in sys.modules


# ---- the kernels ----


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("exponents", ["near", "far"])
@pytest.mark.parametrize("layout", ["masked", "contig"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_interpreted_kernels_are_right(recipe, layout, exponents) -> None:
    script = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, script, recipe, layout, exponents]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(found.stdout) <= 1
