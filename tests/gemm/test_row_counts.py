"""Row counts on both sides of where the CPU kernels hand over to the machine's matrix product."""

import pytest
import torch

from dgmoe_ops.testing import compare

ROWS = (1, 5, 64, 127, 128, 300, 1100)
N, K = 72, 192


@pytest.fixture(scope="module")
def operands():
    g = torch.Generator().manual_seed(5)
    a, b = torch.randn(1280, K, generator=g), torch.randn(2, N, K, generator=g)
    return a, b


def quantized(x, device):
    q, scale = torch.ops.dgmoe.quant_group_fp8(x.to(device), 128, 1)
    return q, scale


def run(operands, rows, dtype, layout, device):
    """The result for the first `rows` rows, all of expert 1; expert 0 has none."""
    a, b = operands
    m = -(-rows // 128) * 128
    where = torch.full((m,), -1, dtype=torch.int32)
    where[:rows] = 1
    masked = layout == "masked"
    info = torch.tensor([0, rows], dtype=torch.int32) if masked else where
    info = info.to(device)
    hint = (rows,) if masked else ()
    if dtype == "bf16":
        x, w = a[:m].bfloat16().to(device), b.bfloat16().to(device)
        x = torch.stack((torch.full_like(x, float("nan")), x)) if masked else x
        op = f"grouped_gemm_nt_bf16_{layout}"
        args = (x, w, info, *hint)
    else:
        q, scale = quantized(a[:m], device)
        w, w_scale = torch.ops.dgmoe.quant_block_fp8(b.to(device))
        if masked:
            q = torch.stack((q.view(torch.uint8),) * 2).view(q.dtype)
            scale = torch.ops.dgmoe.align_scale(torch.stack((scale, scale)))
        op = f"grouped_gemm_nt_f8f8bf16_{layout}"
        args = (q, scale, w, w_scale, info, *hint)
    d = getattr(torch.ops.dgmoe, op)(*args)
    return op, args, d, (d[1] if masked else d)[:rows]


@pytest.mark.parametrize("layout", ["masked", "contig"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_count_keeps_the_bound(rows, dtype, layout, operands, device) -> None:
    op, args, d, _ = run(operands, rows, dtype, layout, device)
    compare.assert_matches(op, d, args, {})


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", ROWS)
def test_layouts_agree_at_every_row_count(rows, dtype, operands, device) -> None:
    masked, contig = (
        run(operands, rows, dtype, layout, device)[3] for layout in ("masked", "contig")
    )
    assert torch.equal(masked, contig)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_bits_do_not_depend_on_the_row_count(dtype, operands, device, monkeypatch) -> None:
    monkeypatch.setenv("DGMOE_BATCH_INVARIANT", "1")
    whole = run(operands, max(ROWS), dtype, "contig", device)[3]
    for rows in ROWS:
        assert torch.equal(run(operands, rows, dtype, "masked", device)[3], whole[:rows]), rows
