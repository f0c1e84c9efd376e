"""Run the Triton kernels by Triton's interpreter, in a process of its own, and print the largest
error in units of what fp8 operands allow: `python triton_interpreted.py mxfp4 masked`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

BACKEND = Path(__file__).parents[2] / "dgmoe_ops" / "backends" / "triton" / "kernel.py"
EXPERTS, N, K, M, BM, BN = 2, 72, 256, 128, 16, 64
COUNTS = (3, 20)
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def kernels():
    spec = importlib.util.spec_from_file_location("kernel", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed(byte: torch.Tensor) -> torch.Tensor:
    """Exponents [.., mn, groups] as words, MN-major."""
    *batch, mn, groups = byte.shape
    full = torch.zeros(*batch, mn, -(-groups // 4) * 4, dtype=torch.uint8)
    full[..., :groups] = byte
    return full.view(torch.int32).transpose(-1, -2).contiguous().transpose(-1, -2)


def scaled(values: torch.Tensor, byte: torch.Tensor, columns: int) -> torch.Tensor:
    return values.double() * torch.exp2(byte.double() - 127).repeat_interleave(columns, -1)


def main(recipe: str, layout: str, far: bool) -> float:
    g = torch.Generator().manual_seed(0)
    fp4, masked = recipe == "mxfp4", layout == "masked"
    columns = 128 if fp4 else 32
    lead = (EXPERTS, M) if masked else (EXPERTS * M,)
    a = torch.randn((*lead, K), generator=g).to(torch.float8_e4m3fn)
    a_byte = torch.randint(120, 130, (*lead, K // columns), generator=g)
    span = (90, 150) if far else (118, 128)
    b_byte = torch.randint(*span, (EXPERTS, N, K // 32), generator=g)
    if fp4:
        codes = torch.randint(0, 16, (EXPERTS, N, K), generator=g)
        b = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        values = torch.where(codes >= 8, -1.0, 1.0).double() * VALUES[codes % 8]
    else:
        b = torch.randn((EXPERTS, N, K), generator=g).to(torch.float8_e4m3fn)
        values = b
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    valid = torch.arange(M) < counts[:, None]
    owner = torch.arange(EXPERTS)[:, None].expand(EXPERTS, M)
    info = counts if masked else torch.where(valid, owner, -1).int().flatten()
    d = torch.zeros((*lead, N), dtype=torch.bfloat16)
    a_scale, b_scale = packed(a_byte.to(torch.uint8)), packed(b_byte.to(torch.uint8))
    batch = a_scale.stride(0) if masked else 0
    run = kernels()
    function = run.masked_kernel if masked else run.contig_kernel
    more = {"EXPERTS": 2} if masked else {}
    strides = (batch, a_scale.stride(-1), b_scale.stride(0), b_scale.stride(-1))
    grid = (3,) if masked else (EXPERTS * -(-N // BN),)
    rows = a.shape[-2]
    function[grid](
        a, a_scale, b, b_scale, info, d, EXPERTS, rows, N, K, *strides, **more, FP4=fp4,
        A_GROUPS=128 // columns, BM=BM, BN=BN, EVEN_N=False, STAGES=1, ASM=False,
    )  # fmt: skip
    x = scaled(a, a_byte, columns).view(EXPERTS, M, K)
    w = scaled(values, b_byte, 32)
    right = torch.einsum("emk,enk->emn", x, w)
    size = torch.einsum("emk,enk->emn", x.abs(), w.abs())
    apart = (d.view(EXPERTS, M, N).double() - right).abs()
    # The interpreter rounds to bf16 towards zero.
    worst = (apart / (right.abs() * 2**-7 + size * 2**-20))[valid]
    untouched = d.view(EXPERTS, M, N)[~valid].abs().max()
    return float(worst.max()) if untouched == 0 else float("inf")


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], sys.argv[3] == "far"))
