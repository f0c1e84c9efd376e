"""The DeepGEMM adapter without a GPU: a stand-in `deep_gemm`, CPU tensors, a pretended device."""

import sys
import types

import pytest
import torch

from dgmoe_ops import ops
from dgmoe_ops.backends import deep_gemm as backend
from dgmoe_ops.layouts import ScaleForm, ceil_div, scale_sizes_and_strides

E, M, N, K = 2, 128, 24, 256
GROUPS = K // 128


def _scale(batch, rows, groups, form):
    sizes, strides = scale_sizes_and_strides(batch, rows, groups, form)
    dtype = torch.int32 if form == ScaleForm.PACKED_UE8M0 else torch.float32
    return torch.empty_strided(sizes, strides, dtype=dtype).fill_(1)


def _masked_args(form=ScaleForm.MN_MAJOR, m=M, n=N, k=K, experts=E):
    a = torch.zeros(experts, m, k).to(torch.float8_e4m3fn)
    b = torch.zeros(experts, n, k).to(torch.float8_e4m3fn)
    groups = ceil_div(k, 128)
    if form == ScaleForm.PACKED_UE8M0:
        b_scale = _scale(experts, n, groups, form)
    else:
        b_scale = torch.ones(experts, ceil_div(n, 128), groups)
    masked_m = torch.zeros(experts, dtype=torch.int32)
    return a, _scale(experts, m, groups, form), b, b_scale, masked_m, 1


def _contig_args(m=M):
    a, _, b, b_scale, _, _ = _masked_args(m=m)
    m_indices = torch.zeros(m, dtype=torch.int32)
    return a[0], _scale(None, m, GROUPS, ScaleForm.MN_MAJOR), b, b_scale, m_indices


class Library(types.ModuleType):
    """A `deep_gemm` whose functions record how they were called."""

    def __init__(self, *names, error=None):
        super().__init__("deep_gemm")
        self.calls = []
        for name in names:
            setattr(self, name, self._function(name, error))

    def _function(self, name, error):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if error is not None:
                raise error

        return call


@pytest.fixture
def pretend(monkeypatch):
    """Install a library, an architecture and an installed version for one test."""

    def install(library, arch_major=9, version="sgl-deep-gemm 0.1.5.post1", torch_version="2.11.0"):
        monkeypatch.setitem(sys.modules, "deep_gemm", library)
        monkeypatch.setattr(backend, "_proven", {})
        monkeypatch.setattr(backend, "_home", None)
        monkeypatch.setattr(backend, "_arch_major", lambda index: arch_major)
        monkeypatch.setattr(backend, "version", lambda: version)
        monkeypatch.setattr(torch, "__version__", torch_version)
        return library

    return install


@pytest.mark.parametrize("op", sorted(backend.FUNCTION_NAMES))
def test_every_name_is_found(op):
    for name in backend.FUNCTION_NAMES[op]:
        library = Library(name)
        assert backend.find_function(library, op) is getattr(library, name)
    assert backend.find_function(Library("something_else"), op) is None


def test_masked_call_reaches_the_library_with_a_checked_result(pretend):
    library = pretend(Library("fp8_m_grouped_gemm_nt_masked"))
    a, a_scale, b, b_scale, masked_m, expected_m = args = _masked_args()
    d = backend.grouped_gemm_nt_f8f8bf16_masked(*args)
    assert d.shape == (E, M, N) and d.dtype == torch.bfloat16 and d.is_contiguous()
    [(_, got, kwargs)] = library.calls
    assert got[0] == (a, a_scale) and got[1] == (b, b_scale) and got[2] is d
    assert got[3] is masked_m and got[4] == expected_m and not kwargs


def test_contig_and_bf16_calls(pretend):
    names = [names[0] for names in backend.FUNCTION_NAMES.values()]
    library = pretend(Library(*names))
    assert backend.grouped_gemm_nt_f8f8bf16_contig(*_contig_args()).shape == (M, N)
    a, b = torch.zeros(E, M, K).bfloat16(), torch.zeros(E, N, K).bfloat16()
    masked_m, m_indices = torch.zeros(E, dtype=torch.int32), torch.zeros(M, dtype=torch.int32)
    assert backend.grouped_gemm_nt_bf16_masked(a, b, masked_m, 3).shape == (E, M, N)
    assert backend.grouped_gemm_nt_bf16_contig(a[0], b, m_indices).shape == (M, N)
    assert [name for name, _, _ in library.calls] == [
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_bf16_gemm_nt_masked",
        "m_grouped_bf16_gemm_nt_contiguous",
    ]
    assert library.calls[1][1][4] == 3


def test_the_ops_checks_come_first(pretend):
    library = pretend(Library("m_grouped_fp8_gemm_nt_masked"))
    args = list(_masked_args())
    args[5] = 0
    with pytest.raises(ValueError, match="grouped_gemm_nt_f8f8bf16_masked: expected_m must be at"):
        backend.grouped_gemm_nt_f8f8bf16_masked(*args)
    assert not library.calls


@pytest.mark.parametrize("sizes", [{"m": 0}, {"n": 0}, {"experts": 0}, {"k": 0}])
def test_empty_operands_need_no_library(pretend, sizes):
    pretend(None)
    d = backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args(**sizes))
    assert (d == 0).all()


def test_sm90_takes_aligned_fp32_scales_only(pretend):
    library = pretend(Library("m_grouped_fp8_gemm_nt_masked"))
    a, a_scale, b, b_scale, masked_m, expected_m = _masked_args()
    row_major = torch.ones(E, M, GROUPS)
    with pytest.raises(ValueError, match=r"a_scale must be MN-major.*align_scale.*float32 row-maj"):
        backend.grouped_gemm_nt_f8f8bf16_masked(a, row_major, b, b_scale, masked_m, 1)
    packed = _scale(E, M, GROUPS, ScaleForm.PACKED_UE8M0)
    with pytest.raises(ValueError, match=r"a_scale must be float32 on SM90, got packed UE8M0"):
        backend.grouped_gemm_nt_f8f8bf16_masked(a, packed, b, b_scale, masked_m, 1)
    packed_b = _scale(E, N, GROUPS, ScaleForm.PACKED_UE8M0)
    with pytest.raises(ValueError, match=r"b_scale must be contiguous float32.*got packed UE8M0"):
        backend.grouped_gemm_nt_f8f8bf16_masked(a, a_scale, b, packed_b, masked_m, 1)
    narrow = _scale(E, M, K // 32, ScaleForm.MN_MAJOR)
    narrow_b = torch.ones(E, 1, K // 32)
    recipes = {"recipe_a": (1, 32), "recipe_b": (128, 32)}
    with pytest.raises(ValueError, match=r"recipe_a and recipe_b must be .* got \(1, 32\)"):
        backend.grouped_gemm_nt_f8f8bf16_masked(a, narrow, b, narrow_b, masked_m, 1, **recipes)
    assert not library.calls
    spelled_out = {"recipe_a": (1, 128), "recipe_b": (128, 128)}
    backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args(), **spelled_out)
    assert not library.calls[0][2]


@pytest.mark.parametrize("arch_major", [10, 12])
def test_newer_devices_take_packed_scales_and_recipes(pretend, arch_major):
    library = pretend(Library("m_grouped_fp8_gemm_nt_masked"), arch_major)
    args = _masked_args(ScaleForm.PACKED_UE8M0)
    backend.grouped_gemm_nt_f8f8bf16_masked(*args)
    backend.grouped_gemm_nt_f8f8bf16_masked(*args, recipe_a=[1, 128], recipe_b=[1, 128])
    assert library.calls[0][2] == {}
    assert library.calls[1][2] == {"recipe_a": (1, 128), "recipe_b": (1, 128)}
    with pytest.raises(ValueError, match=rf"a_scale must be packed.*SM{arch_major}0.*got float32"):
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())


def test_other_devices_are_refused(pretend):
    pretend(Library("m_grouped_fp8_gemm_nt_masked"), arch_major=8)
    with pytest.raises(ValueError, match="must be on an SM90, SM100 or SM120 device, got SM80"):
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"k": 136}, "k must be a multiple of 16"),
        ({"n": 20}, "n must be a multiple of 8"),
        ({"m": 64}, "a must have a multiple of 128 rows an expert"),
    ],
)
def test_sizes_that_the_library_would_trap_on(pretend, sizes, text):
    pretend(Library("m_grouped_fp8_gemm_nt_masked"))
    with pytest.raises(ValueError, match=text):
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args(**sizes))


def test_sizes_that_do_run(pretend):
    library = pretend(Library(*(n[0] for n in backend.FUNCTION_NAMES.values())))
    backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args(m=64, experts=1))
    backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args(k=208))
    assert len(library.calls) == 2
    with pytest.raises(ValueError, match="multiple of 128 rows on CUDA, got 64"):
        backend.grouped_gemm_nt_f8f8bf16_contig(*_contig_args(m=64))


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
@pytest.mark.parametrize("batch", [None, 2])
def test_is_mn_major_knows_what_the_ops_make(rows, batch):
    for form in (ScaleForm.MN_MAJOR, ScaleForm.PACKED_UE8M0):
        assert backend.is_mn_major(_scale(batch, rows, 5, form))
    if rows > 1:
        assert not backend.is_mn_major(_scale(batch, rows, 5, ScaleForm.ROW_MAJOR))


def test_align_scale_makes_what_sm90_takes():
    assert backend.is_mn_major(ops.align_scale(torch.ones(2, 5, 3)))


def test_missing_library_names_the_wheel(pretend):
    pretend(None, version=None)  # None in sys.modules makes the import fail as for a missing module
    with pytest.raises(RuntimeError) as caught:
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())
    text = str(caught.value)
    assert "found torch 2.11.0 and no DeepGEMM (not installed)" in text
    assert "pip install sgl-deep-gemm==0.1.5.post1 apache-tvm-ffi==0.1.11" in text


def test_first_call_of_the_wrong_wheel_names_the_right_one(pretend):
    error = RuntimeError("dim == 2 or dim == 3")
    pretend(Library("m_grouped_fp8_gemm_nt_masked", error=error), version="sgl-deep-gemm 0.2.0")
    with pytest.raises(RuntimeError, match=r"gemm 0\.2\.0 .*dim == 2.*0\.1\.5\.post1 fits"):
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())


def test_errors_of_the_right_wheel_stay_what_they_are(pretend):
    error = RuntimeError("no kernel image")
    pretend(Library("m_grouped_fp8_gemm_nt_masked", error=error))
    with pytest.raises(RuntimeError) as caught:
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())
    assert caught.value is error


def test_a_library_without_the_function(pretend):
    pretend(Library("fp8_gemm_nt"))
    with pytest.raises(RuntimeError, match="it has none of m_grouped_fp8_gemm_nt_masked"):
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())


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


def test_cuda_kernels_are_registered_without_the_library():
    assert "deep_gemm" not in sys.modules
    for op in backend.FUNCTION_NAMES:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dgmoe::{op}", "CUDA")


def test_describe_names_the_backend(pretend):
    assert backend.describe("cpu") == "dgmoe_ops CPU kernel"
    pretend(None)
    assert backend.describe("cuda:0") == "DeepGEMM (sgl-deep-gemm 0.1.5.post1)"
    pretend(None, version=None)
    assert backend.describe("cuda") == "DeepGEMM (not installed)"


def test_the_first_gpu_keeps_the_library(pretend, monkeypatch):
    library = pretend(Library("m_grouped_fp8_gemm_nt_masked"))
    backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())
    monkeypatch.setattr(backend, "_home", 1)
    with pytest.raises(RuntimeError, match="on cuda:1 and now asks for cuda:-1: run one process"):
        backend.grouped_gemm_nt_f8f8bf16_masked(*_masked_args())
    assert len(library.calls) == 1


def test_one_expert_needs_no_batch_stride(pretend):
    library = pretend(Library("m_grouped_fp8_gemm_nt_masked"))
    a, a_scale, *rest = _masked_args(experts=1)
    loose = a_scale.as_strided(a_scale.shape, (1, *a_scale.stride()[1:]))
    backend.grouped_gemm_nt_f8f8bf16_masked(a, loose, *rest)
    assert library.calls[0][1][0][1].stride() == a_scale.stride()


def test_misaligned_operands_are_refused(pretend):
    pretend(Library("m_grouped_fp8_gemm_nt_masked"))
    a, a_scale, b, *rest = _masked_args()
    room = torch.empty(b.numel() + 8, dtype=torch.uint8)
    moved = room[8:].view(b.shape).copy_(b.view(torch.uint8)).view(b.dtype)
    with pytest.raises(ValueError, match="b must start on 16 bytes on CUDA"):
        backend.grouped_gemm_nt_f8f8bf16_masked(a, a_scale, moved, *rest)
