"""GEMM room: `a @ b^T`, dense, or by expert on a masked slab or on contiguous segments.

On CPU the kernels are ours; on CUDA DeepGEMM runs them (`dgmoe_ops.backends`), but for MX weights
on SM90: kernels of ours multiply these, and Triton what they do not take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends import entry, heuristics
from ..formats.gemm import GroupedGemmSpec
from ..formats.layout import Layout
from ._registry import fake_of

entry.register()


def grouped_gemm_nt_f8f8bf16_masked(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    *,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each expert's valid slab rows by its weight: `d[e, :masked_m[e]] = a[e] @ b[e]^T`.

    Args:
        a: (experts, m, k) float8_e4m3fn, contiguous.
        a_scale: (experts, m, groups) float32, or packed UE8M0 int32; any strides on CPU, MN-major
            on CUDA.
        b: (experts, n, k) float8_e4m3fn, or (experts, n, k / 2) int8: two e2m1 codes a byte, the
            low nibble first; contiguous.
        b_scale: (experts, ceil(n / 128), ceil(k / 128)) float32, or packed UE8M0 int32 (experts, n,
            ceil(k / 512)). For int8 `b` packed: (experts, n, ceil(k / 128)) by default.
        masked_m: (experts,) int32, valid rows of each expert.
        expected_m: a hint at the rows an expert has, at least 1, from which a kernel is chosen. It
            never changes the result, but for MX weights on SM90: up to 14, up to 72 and above other
            kernels run, whose last bits may differ.
        recipe_a, recipe_b: (rows, columns) that one scale covers, given together. Default (1, 128)
            and (128, 128), or (1, 128) twice where `b_scale` is packed, or (1, 128) and (1, 32) for
            int8 `b`. MXFP8 is (1, 32) twice.
        out: a contiguous buffer to write the result into, on 16 bytes, apart from the inputs;
            returned.
        workspace: uint8 or int8 with one dimension, contiguous, on 16 bytes, apart from the other
            tensors: what the kernel would allocate, at least `grouped_gemm_workspace_bytes`. Its
            contents are undefined afterwards. Without it the op allocates.

    MXFP8 and FP4 are the formats of the OCP Microscaling Formats specification 1.0. SM90 has its
    own kernels for them: with more than 14 expected rows they take a workspace of up to 9/8 of a
    byte a value of `a`, with more than 72 of 2 bytes, at most 8 GiB of rows.

    Returns:
        (experts, m, n) bfloat16; rows from masked_m[e] on are undefined. fp32 accumulation, one
        rounding.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or scale form.
    """
    args = (a, a_scale, b, b_scale, masked_m, expected_m)
    recipes = {"recipe_a": recipe_a, "recipe_b": recipe_b}
    if workspace is not None and out is None:
        # The functional op writes nothing of its caller's.
        out = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=torch.bfloat16)
    if out is None:
        return torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_masked(*args, **recipes)
    torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_masked.out(
        *args, **recipes, out=out, workspace=workspace
    )
    return out


@fake_of("grouped_gemm_nt_f8f8bf16_masked")
def _grouped_gemm_nt_f8f8bf16_masked_fake(
    a, a_scale, b, b_scale, masked_m, expected_m, *, recipe_a=None, recipe_b=None
):
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]), dtype=torch.bfloat16)


@fake_of("grouped_gemm_nt_f8f8bf16_masked.out")
def _grouped_gemm_nt_f8f8bf16_masked_out_fake(
    a,
    a_scale,
    b,
    b_scale,
    masked_m,
    expected_m,
    *,
    recipe_a=None,
    recipe_b=None,
    out,
    workspace=None,
):
    return None


def grouped_gemm_nt_f8f8bf16_contig(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row by its expert's weight: `d[r] = a[r] @ b[m_indices[r]]^T`.

    Args:
        a: (m, k) float8_e4m3fn, contiguous.
        a_scale: (m, groups) float32, or packed UE8M0 int32; any strides on CPU, MN-major on CUDA.
        b, b_scale, recipe_a, recipe_b: as in `grouped_gemm_nt_f8f8bf16_masked`, and who multiplies
            MX weights on SM90 too; the rows an expert is expected to have follow from m.
        m_indices: (m,) int32, the expert of each row, -1 for padding. An expert's rows stand
            together, in front of the padding of its segment.
        out: a contiguous buffer to write the result into, on 16 bytes, apart from the inputs;
            returned.
        workspace: as in `grouped_gemm_nt_f8f8bf16_masked`.

    Returns:
        (m, n) bfloat16; rows with m_indices -1 are undefined.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or scale form.
    """
    args = (a, a_scale, b, b_scale, m_indices)
    recipes = {"recipe_a": recipe_a, "recipe_b": recipe_b}
    if workspace is not None and out is None:
        # The functional op writes nothing of its caller's.
        out = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=torch.bfloat16)
    if out is None:
        return torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_contig(*args, **recipes)
    torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_contig.out(
        *args, **recipes, out=out, workspace=workspace
    )
    return out


@fake_of("grouped_gemm_nt_f8f8bf16_contig")
def _grouped_gemm_nt_f8f8bf16_contig_fake(
    a, a_scale, b, b_scale, m_indices, *, recipe_a=None, recipe_b=None
):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)


@fake_of("grouped_gemm_nt_f8f8bf16_contig.out")
def _grouped_gemm_nt_f8f8bf16_contig_out_fake(
    a, a_scale, b, b_scale, m_indices, *, recipe_a=None, recipe_b=None, out, workspace=None
):
    return None


def grouped_gemm_workspace_bytes(
    layout: Layout | str,
    experts: int,
    m: int,
    n: int,
    k: int,
    *,
    expected_m: int | None = None,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
    fp4: bool = False,
    arch: int | str | None = None,
) -> int:
    """Return the bytes of workspace that a grouped GEMM of fp8 rows takes, by its sizes alone.

    Only MX weights with more than a few rows an expert take one, on SM90: a's rows are prepared
    there.

    Args:
        layout: "masked" or "contig".
        experts: of the weight.
        m: rows of an expert's slab, or of all segments.
        n, k: of the weight, in values.
        expected_m: of a masked GEMM, at least 1; a call with another hint may take more or less.
        recipe_a, recipe_b, fp4: as in `grouped_gemm_nt_f8f8bf16_masked`; `fp4` for int8 `b`.
        arch: compute capability major * 10 + minor, or "cpu". Default the current GPU's, or "cpu"
            where there is none.

    Returns:
        What `workspace=` must have at least; 0 where nothing is needed.

    Raises:
        ValueError: an argument is wrong.
    """

    def fail(arg: str, must: str, got: object) -> None:
        raise ValueError(f"dgmoe_ops.grouped_gemm_workspace_bytes: {arg} must {must}, got {got!r}")

    names = [known.value for known in Layout]
    if layout not in names:
        fail("layout", f"be one of {', '.join(names)}", layout)
    if (recipe_a is None) != (recipe_b is None):
        fail("recipe_a", "be given together with recipe_b", recipe_a)
    for arg, size in (("experts", experts), ("m", m), ("n", n), ("k", k)):
        if size < 0:
            fail(arg, "be at least 0", size)
    layout = Layout(layout)
    if layout.has_slabs and (expected_m is None or expected_m < 1):
        fail("expected_m", "be at least 1 for the masked layout", expected_m)
    if fp4 and recipe_a is None:
        recipe_a, recipe_b = (1, 128), (1, 32)
    if arch is None:
        arch = "cpu"
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            arch = 10 * major + minor
    given = (None, None) if recipe_a is None else (tuple(recipe_a), tuple(recipe_b))
    hint = expected_m if layout.has_slabs else 0
    spec = GroupedGemmSpec(layout, experts, m, n, k, hint, *given, fp4)
    return heuristics.gemm_plan(spec, arch).workspace_bytes


def grouped_gemm_nt_bf16_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each expert's valid slab rows by its weight, in bfloat16.

    Args:
        a: (experts, m, k) bfloat16, contiguous.
        b: (experts, n, k) bfloat16, contiguous.
        masked_m, expected_m: as in `grouped_gemm_nt_f8f8bf16_masked`.
        out: a contiguous buffer to write the result into, on 16 bytes, apart from the inputs;
            returned.

    Returns:
        (experts, m, n) bfloat16; rows from masked_m[e] on are undefined.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    if out is None:
        return torch.ops.dgmoe.grouped_gemm_nt_bf16_masked(a, b, masked_m, expected_m)
    torch.ops.dgmoe.grouped_gemm_nt_bf16_masked.out(a, b, masked_m, expected_m, out=out)
    return out


@fake_of("grouped_gemm_nt_bf16_masked")
def _grouped_gemm_nt_bf16_masked_fake(a, b, masked_m, expected_m):
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]))


@fake_of("grouped_gemm_nt_bf16_masked.out")
def _grouped_gemm_nt_bf16_masked_out_fake(a, b, masked_m, expected_m, *, out):
    return None


def grouped_gemm_nt_bf16_contig(
    a: torch.Tensor, b: torch.Tensor, m_indices: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each row by its expert's weight, in bfloat16.

    Args:
        a: (m, k) bfloat16, contiguous.
        b: (experts, n, k) bfloat16, contiguous.
        m_indices: as in `grouped_gemm_nt_f8f8bf16_contig`.
        out: a contiguous buffer to write the result into, on 16 bytes, apart from the inputs;
            returned.

    Returns:
        (m, n) bfloat16; rows with m_indices -1 are undefined.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    if out is None:
        return torch.ops.dgmoe.grouped_gemm_nt_bf16_contig(a, b, m_indices)
    torch.ops.dgmoe.grouped_gemm_nt_bf16_contig.out(a, b, m_indices, out=out)
    return out


@fake_of("grouped_gemm_nt_bf16_contig")
def _grouped_gemm_nt_bf16_contig_fake(a, b, m_indices):
    return a.new_empty((a.shape[0], b.shape[1]))


@fake_of("grouped_gemm_nt_bf16_contig.out")
def _grouped_gemm_nt_bf16_contig_out_fake(a, b, m_indices, *, out):
    return None


def gemm_nt_f8f8bf16(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply fp8 rows by an fp8 weight: `d = a @ b^T`.

    Args:
        a: (m, k) float8_e4m3fn, contiguous.
        a_scale: (m, groups) float32, or packed UE8M0 int32; any strides on CPU, MN-major on CUDA.
        b: (n, k) float8_e4m3fn, contiguous.
        b_scale: (ceil(n / 128), ceil(k / 128)) float32, or packed UE8M0 int32 (n, ceil(k / 512)).
        recipe_a, recipe_b: as in `grouped_gemm_nt_f8f8bf16_masked`.
        out: a contiguous buffer to write the result into, on 16 bytes, apart from the inputs;
            returned.

    Returns:
        (m, n) bfloat16: fp32 accumulation, one rounding.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or scale form.
    """
    args, recipes = (a, a_scale, b, b_scale), {"recipe_a": recipe_a, "recipe_b": recipe_b}
    if out is None:
        return torch.ops.dgmoe.gemm_nt_f8f8bf16(*args, **recipes)
    torch.ops.dgmoe.gemm_nt_f8f8bf16.out(*args, **recipes, out=out)
    return out


@fake_of("gemm_nt_f8f8bf16")
def _gemm_nt_f8f8bf16_fake(a, a_scale, b, b_scale, *, recipe_a=None, recipe_b=None):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@fake_of("gemm_nt_f8f8bf16.out")
def _gemm_nt_f8f8bf16_out_fake(a, a_scale, b, b_scale, *, recipe_a=None, recipe_b=None, out):
    return None


def gemm_nt_mxfp8_f8f8bf16(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply MXFP8 rows by an MXFP8 weight: `d = a @ b^T`, a power-of-two scale a 32 columns.

    The format is that of the OCP Microscaling Formats specification 1.0, with e4m3 elements.

    Args:
        a: (m, k) float8_e4m3fn, contiguous.
        a_scale: (m, ceil(k / 32)) float32 powers of two, or packed UE8M0 int32 (m, ceil(k / 128)).
        b: (n, k) float8_e4m3fn, contiguous.
        b_scale: as `a_scale`, for n rows.
        out: a contiguous buffer to write the result into, on 16 bytes, apart from the inputs;
            returned.

    Returns:
        (m, n) bfloat16: fp32 accumulation, one rounding.

    Raises:
        ValueError: an argument has the wrong dtype, rank, size or scale form.
    """
    if out is None:
        return torch.ops.dgmoe.gemm_nt_mxfp8_f8f8bf16(a, a_scale, b, b_scale)
    torch.ops.dgmoe.gemm_nt_mxfp8_f8f8bf16.out(a, a_scale, b, b_scale, out=out)
    return out


@fake_of("gemm_nt_mxfp8_f8f8bf16")
def _gemm_nt_mxfp8_f8f8bf16_fake(a, a_scale, b, b_scale):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@fake_of("gemm_nt_mxfp8_f8f8bf16.out")
def _gemm_nt_mxfp8_f8f8bf16_out_fake(a, a_scale, b, b_scale, *, out):
    return None


def gemm_nt_bf16bf16f32(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply bfloat16 rows by a bfloat16 weight into float32: `d = a @ b^T`.

    Args:
        a: (m, k) bfloat16, contiguous.
        b: (n, k) bfloat16, contiguous.
        out: a contiguous buffer to write the result into, on 16 bytes, apart from the inputs;
            returned.

    Returns:
        (m, n) float32: fp32 accumulation, no further rounding.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    if out is None:
        return torch.ops.dgmoe.gemm_nt_bf16bf16f32(a, b)
    torch.ops.dgmoe.gemm_nt_bf16bf16f32.out(a, b, out=out)
    return out


@fake_of("gemm_nt_bf16bf16f32")
def _gemm_nt_bf16bf16f32_fake(a, b):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)


@fake_of("gemm_nt_bf16bf16f32.out")
def _gemm_nt_bf16bf16f32_out_fake(a, b, *, out):
    return None


def tf32_hc_prenorm_gemm(
    x: torch.Tensor,
    fn: torch.Tensor,
    *,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    sqr_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply hyper-connection rows by the mapping and sum their squares: `x @ fn^T`, `|x|^2`.

    A norm that stands in front of the product divides its result by a function of the second.

    Args:
        x: (m, k) bfloat16, contiguous.
        fn: (n, k) float32, contiguous. A GPU's TF32 cores drop the low 13 bits of its mantissa;
            the CPU multiplies it as it is.
        num_splits: pieces of k, at least 1; the results then are sums over a piece each. A piece is
            a run of 64-wide blocks; the first `blocks % num_splits` pieces have one more.
        out, sqr_sum: contiguous buffers to write the results into, on 16 bytes, apart from the
            inputs and each other; given together; returned.

    Returns:
        (m, n) and (m,) float32, or (num_splits, m, n) and (num_splits, m) where `num_splits` is
        given. fp32 accumulation.

    Raises:
        ValueError: an argument has the wrong dtype, rank or size.
    """
    if (out is None) != (sqr_sum is None):
        got = "sqr_sum alone" if out is None else "out alone"
        raise ValueError(
            f"dgmoe::tf32_hc_prenorm_gemm: out must be given together with sqr_sum, got {got}"
        )
    op = torch.ops.dgmoe.tf32_hc_prenorm_gemm
    if out is None:
        return op(x, fn, num_splits=num_splits)
    op.out(x, fn, num_splits=num_splits, out=out, sqr_sum=sqr_sum)
    return out, sqr_sum


@fake_of("tf32_hc_prenorm_gemm")
def _tf32_hc_prenorm_gemm_fake(x, fn, *, num_splits=None):
    pieces = () if num_splits is None else (num_splits,)
    out = x.new_empty((*pieces, x.shape[0], fn.shape[0]), dtype=torch.float32)
    return out, x.new_empty((*pieces, x.shape[0]), dtype=torch.float32)


@fake_of("tf32_hc_prenorm_gemm.out")
def _tf32_hc_prenorm_gemm_out_fake(x, fn, *, num_splits=None, out, sqr_sum):
    return None
