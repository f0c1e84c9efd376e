"""A stand-in `deep_gemm`, and requests on CPU tensors, for tests of the adapter without a GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from dgmoe_ops.backends.deep_gemm import library, native, overlap, switches, versions
from dgmoe_ops.backends.request import Operands, Request, request_of
from dgmoe_ops.formats.layouts import ScaleLayout, ceil_div, scale_sizes_and_strides

E, M, N, K = 2, 128, 24, 256
F8_MASKED = "grouped_gemm_nt_f8f8bf16_masked"
F8_CONTIG = "grouped_gemm_nt_f8f8bf16_contig"
PROOF = "bf16_gemm_nt"


def scales(batch, rows, groups, form):
    sizes, strides = scale_sizes_and_strides(batch, rows, groups, form)
    dtype = torch.int32 if form == ScaleLayout.PACKED_UE8M0 else torch.float32
    value = 0x7F7F7F7F if dtype == torch.int32 else 1
    return torch.empty_strided(sizes, strides, dtype=dtype).fill_(value)


def request(
    op=F8_MASKED, form=ScaleLayout.MN_MAJOR, m=M, n=N, k=K, experts=E, **changes
) -> Request:
    """A request of any of the ops, with the scales of `form`."""
    masked, grouped = op.endswith("masked"), op.startswith("grouped")
    batch = experts if masked else None
    quantized = "f8f8" in op
    dtype = torch.float8_e4m3fn if quantized else torch.bfloat16
    a = torch.zeros((experts, m, k) if masked else (m, k)).to(dtype)
    b = torch.zeros((experts, n, k) if grouped else (n, k)).to(dtype)
    if op == "tf32_hc_prenorm_gemm":
        b = b.float()
    columns = 32 if "mxfp8" in op else 128
    a_scale = b_scale = None
    if quantized:
        a_scale = scales(batch, m, ceil_div(k, columns), form)
        if form == ScaleLayout.PACKED_UE8M0:
            b_scale = scales(experts if grouped else None, n, ceil_div(k, columns), form)
        else:
            shape = (ceil_div(n, 128), ceil_div(k, columns))
            b_scale = torch.ones((experts, *shape) if grouped else shape)
    info = None
    if grouped:
        info = torch.zeros(experts if masked else m, dtype=torch.int32)
    wide = op in ("gemm_nt_bf16bf16f32", "tf32_hc_prenorm_gemm")
    shape = (experts, m, n) if masked else (m, n)
    d = torch.empty(shape, dtype=torch.float32 if wide else torch.bfloat16)
    sqr_sum = torch.empty(m) if op == "tf32_hc_prenorm_gemm" else None
    mx = ((1, 32), (1, 32)) if "mxfp8" in op else (None, None)
    operands = Operands(a, a_scale, b, b_scale, info, d, sqr_sum)
    given = {key: changes.pop(key) for key in set(changes) & set(Operands._fields)}
    facts = {"expected_m": int(masked), "granularity_a": mx[0], "granularity_b": mx[1]}
    return request_of(op, operands._replace(**given), **{**facts, **changes})


def mx_request(op: str, recipe: str, **sizes) -> Request:
    """A request of a grouped GEMM for MXFP8 weights, or for FP4 ones."""
    made = request(op, ScaleLayout.PACKED_UE8M0, **sizes)
    spec, operands = made.spec, made.operands
    groups = ceil_div(spec.k, 32)
    b_scale = scales(spec.experts, spec.n, groups, ScaleLayout.PACKED_UE8M0)
    if recipe == "mxfp4":
        b = torch.zeros((*operands.b.shape[:2], spec.k // 2), dtype=torch.int8)
        operands = operands._replace(b=b, b_scale=b_scale)
        columns = 128
    else:
        batch = spec.experts if spec.masked else None
        a_scale = scales(batch, spec.m, groups, ScaleLayout.PACKED_UE8M0)
        operands = operands._replace(a_scale=a_scale, b_scale=b_scale)
        columns = 32
    return request_of(
        op,
        operands,
        expected_m=spec.expected_m,
        granularity_a=(1, columns),
        granularity_b=(1, 32),
    )


class Library(types.ModuleType):
    """A `deep_gemm` whose functions record how they were called."""

    def __init__(self, *names, error=None, proof="right"):
        super().__init__("deep_gemm")
        self.calls = []
        for name in names:
            setattr(self, name, self._function(name, error))
        recorded = getattr(self, PROOF, None)

        def product(a, b, d, *args, **kwargs):
            if recorded is not None:
                recorded(a, b, d, *args, **kwargs)
            if isinstance(proof, Exception):
                raise proof
            d.copy_(a.float() @ b.float().T + (proof == "wrong"))

        if proof is not None:
            setattr(self, PROOF, product)

    def _function(self, name, error):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if error is not None:
                raise error

        return call


@pytest.fixture
def pretend(monkeypatch):
    """Install a library, an architecture and an installed version for one test."""

    def install(found, arch_major=9, version="sgl-deep-gemm 0.1.5.post1", torch_version="2.11.0"):
        monkeypatch.setitem(sys.modules, "deep_gemm", found)
        monkeypatch.setattr(library, "_module", None)
        monkeypatch.setattr(library, "_home", None)
        monkeypatch.setattr(library, "arch_major", lambda index: arch_major)
        for module in (versions, library, native, overlap, switches):
            monkeypatch.setattr(module, "version", lambda: version)
        monkeypatch.setattr("dgmoe_ops.backends.deep_gemm.version", lambda: version)
        monkeypatch.setattr(native, "_bound", set())
        monkeypatch.setattr(torch, "__version__", torch_version)
        return found

    return install
