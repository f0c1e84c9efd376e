"""The DeepGEMM adapter without a GPU: a stand-in `deep_gemm`, CPU tensors, a pretended device."""

import subprocess
import sys

import pytest
import torch
from deep_gemm_stand_in import F8_CONTIG, F8_MASKED, PROOF, E, K, Library, M, N, request, scales
from deep_gemm_stand_in import pretend as pretend

from dgmoe_ops import ops
from dgmoe_ops.backends import deep_gemm as backend
from dgmoe_ops.backends import scales as checks
from dgmoe_ops.backends.deep_gemm import library as adapter
from dgmoe_ops.backends.request import OPS
from dgmoe_ops.backends.scales import with_strides_of
from dgmoe_ops.formats.layouts import ScaleLayout

GROUPS = K // 128
MASKED = "m_grouped_fp8_gemm_nt_masked"
ALL_NAMES = tuple(dict.fromkeys(names[0] for names in adapter.FUNCTION_NAMES.values()))


@pytest.mark.parametrize("op", OPS)
def test_every_name_is_found(op):
    for name in adapter.FUNCTION_NAMES[op]:
        library = Library(name, proof=None)
        assert adapter.find_function(library, op) is getattr(library, name)
    assert adapter.find_function(Library("something_else", proof=None), op) is None


def test_masked_call_reaches_the_library(pretend):
    library = pretend(Library("fp8_m_grouped_gemm_nt_masked"))
    made = request()
    backend.run(made)
    [(_, got, kwargs)] = library.calls
    assert got[0] == (made.operands.a, made.operands.a_scale) and got[1] == (
        made.operands.b,
        made.operands.b_scale,
    )
    assert got[2] is made.operands.d and got[3] is made.operands.info and got[4] == 1 and not kwargs


def test_every_op_reaches_its_function(pretend):
    """On SM100, where all eight run."""
    library = pretend(Library(*ALL_NAMES), arch_major=10)
    for op in OPS:
        library.calls.clear()
        made = request(op, ScaleLayout.PACKED_UE8M0)
        backend.run(made)
        # The first product of a process is the proof, by the same function as the last bf16 op.
        name, args, kwargs = library.calls[-1]
        assert name == adapter.FUNCTION_NAMES[op][0]
        assert any(arg is made.operands.d for arg in args), op
        if "mxfp8" in op:
            mx = {"recipe_a": (1, 32), "recipe_b": (1, 32), "disable_ue8m0_cast": True}
            assert kwargs == mx
        else:
            assert not kwargs, op
        if op == "tf32_hc_prenorm_gemm":
            assert args[3] is made.operands.sqr_sum and args[4] is None


def test_mxfp8_is_refused_on_hopper(pretend):
    library = pretend(Library(*ALL_NAMES))
    with pytest.raises(ValueError, match=r"recipe_b must be \(1, 128\) and .* on SM90, got \(1"):
        backend.run(request("gemm_nt_mxfp8_f8f8bf16", ScaleLayout.PACKED_UE8M0))
    assert not library.calls


def test_sm90_takes_aligned_fp32_scales_only(pretend):
    library = pretend(Library(MASKED))
    row_major = torch.ones(E, M, GROUPS)
    with pytest.raises(ValueError, match=r"a_scale must be MN-major.*align_scale.*float32 row-maj"):
        backend.run(request(a_scale=row_major))
    packed = scales(E, M, GROUPS, ScaleLayout.PACKED_UE8M0)
    with pytest.raises(ValueError, match=r"a_scale must be float32 on SM90, got packed UE8M0"):
        backend.run(request(a_scale=packed))
    packed_b = scales(E, N, GROUPS, ScaleLayout.PACKED_UE8M0)
    with pytest.raises(ValueError, match=r"b_scale must be contiguous float32.*got packed UE8M0"):
        backend.run(request(b_scale=packed_b))
    with pytest.raises(ValueError, match=r"recipe_a and recipe_b must be .* got \(1, 32\)"):
        backend.run(request(granularity_a=(1, 32), granularity_b=(128, 32)))
    assert not library.calls
    backend.run(request(granularity_a=(1, 128), granularity_b=(128, 128)))
    assert not library.calls[-1][2]


@pytest.mark.parametrize("arch_major", [10, 12])
def test_newer_devices_take_packed_scales_and_recipes(pretend, arch_major):
    library = pretend(Library(*ALL_NAMES), arch_major)
    made = request(F8_CONTIG, ScaleLayout.PACKED_UE8M0)
    backend.run(made)
    backend.run(made.with_spec(granularity_a=(1, 128), granularity_b=(1, 128)))
    assert library.calls[-2][2] == {}
    assert library.calls[-1][2] == {"recipe_a": (1, 128), "recipe_b": (1, 128)}
    with pytest.raises(ValueError, match=rf"a_scale must be packed.*SM{arch_major}0.*got float32"):
        backend.run(request(F8_CONTIG))


def test_sm120_has_no_masked_kernels(pretend):
    pretend(Library(*ALL_NAMES), 12)
    with pytest.raises(ValueError, match="must be contiguous segments on SM120, which has no"):
        backend.run(request(F8_MASKED, ScaleLayout.PACKED_UE8M0))


@pytest.mark.parametrize("arch_major", [8, 11])
def test_other_devices_are_refused(pretend, arch_major):
    pretend(Library(MASKED), arch_major)
    match = f"must be on an SM90 or SM100 or SM120 device, got SM{arch_major}0"
    with pytest.raises(ValueError, match=match):
        backend.run(request())


@pytest.mark.parametrize(
    ("op", "sizes", "text"),
    [
        (F8_MASKED, {"k": 136}, "k must be a multiple of 16"),
        (F8_MASKED, {"n": 20}, "n must be a multiple of 8"),
        (F8_MASKED, {"m": 64}, "a must have a multiple of 128 rows an expert"),
        (F8_CONTIG, {"m": 64}, "multiple of 128 rows on CUDA, got 64"),
        ("grouped_gemm_nt_bf16_contig", {"k": 96}, "k must be a multiple of 64 on CUDA, got 96"),
        ("gemm_nt_bf16bf16f32", {"k": 8}, "k must be a multiple of 64 on CUDA, got 8"),
        ("tf32_hc_prenorm_gemm", {"n": 40}, "fn must have at most 32 rows"),
        ("tf32_hc_prenorm_gemm", {"k": 32}, "x must have a multiple of 64 columns"),
        ("tf32_hc_prenorm_gemm", {"num_splits": 5}, "num_splits must be at most k / 64 = 4"),
    ],
)
def test_sizes_that_the_library_would_trap_on(pretend, op, sizes, text):
    library = pretend(Library(*ALL_NAMES))
    with pytest.raises(ValueError, match=text):
        backend.run(request(op, **sizes))
    assert not library.calls


def test_sizes_that_do_run(pretend):
    library = pretend(Library(*ALL_NAMES))
    backend.run(request(m=64, experts=1))
    backend.run(request(k=208))
    backend.run(request("gemm_nt_f8f8bf16", m=7))
    assert len(library.calls) == 4  # the proof is the first


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
@pytest.mark.parametrize("batch", [None, 2])
def test_is_mn_major_knows_what_the_ops_make(rows, batch):
    for form in (ScaleLayout.MN_MAJOR, ScaleLayout.PACKED_UE8M0):
        assert checks.is_mn_major(scales(batch, rows, 5, form))
    if rows > 1:
        assert not checks.is_mn_major(scales(batch, rows, 5, ScaleLayout.ROW_MAJOR))


def test_align_scale_makes_what_sm90_takes():
    assert checks.is_mn_major(ops.align_scale(torch.ones(2, 5, 3)))


# ---- the fit ----


def test_missing_library_names_the_wheel(pretend):
    pretend(None, version=None)  # None in sys.modules makes the import fail as for a missing module
    with pytest.raises(RuntimeError) as caught:
        backend.run(request())
    text = str(caught.value)
    assert "found torch 2.11.0 and no DeepGEMM (not installed)" in text
    assert "pip install sgl-deep-gemm==0.1.5.post1 apache-tvm-ffi==0.1.11" in text


def test_the_fit_is_proven_once_before_the_first_call(pretend):
    library = pretend(Library(MASKED, PROOF))
    backend.run(request())
    backend.run(request())
    assert [name for name, _, _ in library.calls] == [PROOF, MASKED, MASKED]


@pytest.mark.parametrize(
    ("proof", "text"),
    [
        (RuntimeError("dim == 2 or dim == 3"), r"first product fails: RuntimeError: dim == 2"),
        ("wrong", "its first product is wrong"),
        (None, "it has none of bf16_gemm_nt"),
    ],
)
def test_a_wheel_that_does_not_fit_names_the_one_that_does(pretend, proof, text):
    """Versions prove nothing: what is tried is one product with a known answer."""
    library = pretend(Library(MASKED, proof=proof), version="sgl-deep-gemm 0.2.0")
    with pytest.raises(RuntimeError, match=rf"gemm 0\.2\.0 \(.*{text}.*0\.1\.5\.post1 fits"):
        backend.run(request())
    assert not library.calls


def test_errors_of_a_fitting_wheel_stay_what_they_are(pretend):
    error = RuntimeError("no kernel image")
    pretend(Library(MASKED, error=error))
    with pytest.raises(RuntimeError) as caught:
        backend.run(request())
    assert caught.value is error


def test_a_library_without_the_function(pretend):
    pretend(Library("fp8_gemm_nt"))
    with pytest.raises(RuntimeError, match="it has none of m_grouped_fp8_gemm_nt_masked"):
        backend.run(request())


def test_a_library_that_takes_no_recipes(pretend):
    library = Library(*ALL_NAMES)
    library.m_grouped_fp8_gemm_nt_contiguous = lambda a, b, d, layout, recipe=None: None
    pretend(library, 10, version="deep-gemm 2.0.0")
    made = request(
        F8_CONTIG, ScaleLayout.PACKED_UE8M0, granularity_a=(1, 32), granularity_b=(1, 32)
    )
    made = made.with_operands(a_scale=scales(None, M, K // 32, ScaleLayout.PACKED_UE8M0))
    made = made.with_operands(b_scale=scales(E, N, K // 32, ScaleLayout.PACKED_UE8M0))
    with pytest.raises(RuntimeError, match="deep-gemm 2.0.0 takes no recipe_a and recipe_b"):
        backend.run(made)


@pytest.mark.parametrize(
    ("torch_version", "text"),
    [
        ("2.13.0+cu130", "sgl-deep-gemm 0.2.0 fits: pip install sgl-deep-gemm==0.2.0 apache"),
        ("2.14.1", "sgl-deep-gemm 0.2.3.post2 fits: pip install sgl-deep-gemm==0.2.3.post2"),
        ("2.12.0", "no wheel is known to fit it, the known pairs of sgl-deep-gemm are torch 2.11"),
        ("2.15.0a0+git1", "no wheel is known"),
    ],
)
def test_misfit_message(torch_version, text):
    message = backend.misfit_message(torch_version, None, "not installed")
    assert text in message and torch_version in message and "\n" not in message


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ("sgl-deep-gemm 0.1.5.post1", "tvm-ffi"),
        ("sgl-deep-gemm 0.2.2", "tvm-ffi"),
        ("sgl-deep-gemm 0.2.3.post2", "TORCH_LIBRARY"),
        ("sgl-deep-gemm 0.2.5", "TORCH_LIBRARY"),
        ("deep-gemm 2.5.0", "pybind11"),
        (None, "pybind11"),
    ],
)
def test_bindings_by_release(found, kind):
    from dgmoe_ops.backends.deep_gemm.versions import binding

    assert binding(found) == kind


def test_the_library_is_not_imported_before_a_call():
    """In a process of its own: others may have called."""
    code = "import sys, dgmoe_ops; sys.exit('deep_gemm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_describe_names_the_backend(pretend):
    assert backend.describe("cpu") == "dgmoe_ops CPU kernel"
    pretend(None)
    assert backend.describe("cuda:0") == "DeepGEMM (sgl-deep-gemm 0.1.5.post1)"
    pretend(None, version=None)
    assert backend.describe("cuda") == "DeepGEMM (not installed)"


def test_the_first_gpu_keeps_the_library(pretend, monkeypatch):
    library = pretend(Library(MASKED))
    backend.run(request())
    monkeypatch.setattr(adapter, "_home", 1)
    calls = len(library.calls)
    with pytest.raises(RuntimeError, match="on cuda:1 and now asks for cuda:-1: run one process"):
        backend.run(request())
    assert len(library.calls) == calls


def test_one_expert_needs_no_batch_stride(pretend):
    library = pretend(Library(MASKED))
    made = request(experts=1)
    loose = made.operands.a_scale.as_strided(
        made.operands.a_scale.shape, (1, *made.operands.a_scale.stride()[1:])
    )
    backend.run(made.with_operands(a_scale=loose))
    assert library.calls[-1][1][0][1].stride() == made.operands.a_scale.stride()


def test_misaligned_operands_are_refused(pretend):
    pretend(Library(MASKED))
    made = request()
    room = torch.empty(made.operands.b.numel() + 8, dtype=torch.uint8)
    moved = (
        room[8:]
        .view(made.operands.b.shape)
        .copy_(made.operands.b.view(torch.uint8))
        .view(made.operands.b.dtype)
    )
    with pytest.raises(ValueError, match="b must start on 16 bytes on CUDA"):
        backend.run(made.with_operands(b=moved))


# ---- the op that C++ calls ----


def through_the_op(made):
    spec = made.spec
    a, b = spec.granularity_a or (0, 0), spec.granularity_b or (0, 0)
    *tensors, d, sqr_sum = made.operands
    numbers = (spec.expected_m, a[1], b[0], b[1], made.num_splits or 0)
    return torch.ops.dgmoe._gemm_run(OPS.index(made.op), *tensors, *numbers, d, sqr_sum)


def test_errors_come_back_as_bytes(pretend):
    library = pretend(Library(MASKED))
    assert through_the_op(request()).numel() == 0
    assert library.calls[-1][0] == MASKED
    text = bytes(through_the_op(request(m=64)).tolist()).decode()
    assert text[0] == "V" and text[1:].startswith(f"dgmoe::{F8_MASKED}: a must have a multiple")
    pretend(None, version=None)
    text = bytes(through_the_op(request()).tolist()).decode()
    assert text[0] == "R" and "pip install sgl-deep-gemm==0.1.5.post1" in text


def test_strides_of_size_1_dimensions_do_not_reach_the_library() -> None:
    """It compares them, though they say nothing."""
    one = torch.ones(1, 4)[:, :1]  # strides (4, 1)
    assert with_strides_of(one, ScaleLayout.ROW_MAJOR).stride() == (1, 1)
    batch = torch.ones(3, 1, 4)[:, :, 2:3].contiguous().as_strided((3, 1, 1), (1, 7, 9))
    assert with_strides_of(batch, ScaleLayout.ROW_MAJOR).stride() == (1, 1, 1)
    strided = torch.ones(3, 4)[:, :2]
    assert with_strides_of(strided, ScaleLayout.ROW_MAJOR) is strided
