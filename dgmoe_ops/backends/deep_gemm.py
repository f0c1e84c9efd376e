"""DeepGEMM behind the grouped GEMM ops on CUDA: found at the first call, then given our buffers.

Its wheels are each built for one torch and say so nowhere in their metadata, so a wheel that does
not fit is the most common trouble: every failure of that kind becomes one sentence that names the
wheel that does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from ..layouts import CONTIG_ALIGNMENT, TILE_ROWS, TMA_ELEMENTS, round_up

#: What each op's function is called, newest name first; the releases differ.
FUNCTION_NAMES = {
    "grouped_gemm_nt_f8f8bf16_masked": (
        "m_grouped_fp8_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
        "m_grouped_fp8_fp4_gemm_nt_masked",
    ),
    "grouped_gemm_nt_f8f8bf16_contig": (
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_fp4_gemm_nt_contiguous",
    ),
    "grouped_gemm_nt_bf16_masked": (
        "m_grouped_bf16_gemm_nt_masked",
        "bf16_m_grouped_gemm_nt_masked",
    ),
    "grouped_gemm_nt_bf16_contig": ("m_grouped_bf16_gemm_nt_contiguous",),
}

#: torch release -> the sgl-deep-gemm that fits it, and what else must be pinned.
WHEELS = {
    (2, 11): ("0.1.5.post1", ("apache-tvm-ffi==0.1.11",)),
    (2, 13): ("0.2.0", ("apache-tvm-ffi==0.1.11",)),
    (2, 14): ("0.2.3.post2", ()),
}

_DISTRIBUTIONS = ("sgl-deep-gemm", "deep-gemm")
_SM90_RECIPES = ((1, 128), (128, 128))
_K_MULTIPLE = {1: 16, 2: 64}  # by bytes of a value: fp8 rows on 16 bytes, bf16 in whole blocks
_proven: dict[str, Callable] = {}  # functions that returned from a call once
_home: int | None = None  # the GPU that the library's loaded kernels belong to
_library: torch.library.Library | None = None


# ---- which wheel is there, and which would fit ----


def version() -> str | None:
    """Name the installed DeepGEMM, as `sgl-deep-gemm 0.1.5.post1`, without importing it.

    None where there is none.
    """
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def fitting_wheel(torch_version: str) -> tuple[str, tuple[str, ...]] | None:
    """Look up the sgl-deep-gemm release, and its extra pins, that fits this torch.

    None where none is known.
    """
    major, minor = torch_version.split("+")[0].split(".")[:2]
    return WHEELS.get((int(major), int(minor)))


def misfit_message(torch_version: str, found: str | None, reason: str) -> str:
    """Say in one sentence what was found, what went wrong, which wheel fits and how to get it."""
    start = (
        "dgmoe_ops: grouped GEMMs on CUDA need a DeepGEMM built for this torch; found torch"
        f" {torch_version} and {found or 'no DeepGEMM'} ({reason}); "
    )
    wheel = fitting_wheel(torch_version)
    if wheel is None:
        pairs = ", ".join(f"torch {a}.{b} with {w}" for (a, b), (w, _) in sorted(WHEELS.items()))
        return start + f"no wheel is known to fit it, the known pairs of sgl-deep-gemm are {pairs}"
    release, pins = wheel
    command = " ".join(["pip install", f"sgl-deep-gemm=={release}", *pins])
    return start + f"sgl-deep-gemm {release} fits: {command}"


def _misfit(reason: str) -> RuntimeError:
    return RuntimeError(misfit_message(torch.__version__, version(), reason))


def find_function(module: ModuleType, op: str) -> Callable | None:
    """Find the library's function for `op` under any of its names."""
    return next((getattr(module, n) for n in FUNCTION_NAMES[op] if hasattr(module, n)), None)


def _resolve(op: str) -> Callable:
    try:
        module = importlib.import_module("deep_gemm")
    except ModuleNotFoundError as error:
        missing = "not installed" if error.name == "deep_gemm" else f"its import fails: {error}"
        raise _misfit(missing) from error
    except Exception as error:
        # A wheel for another torch fails as OSError, RuntimeError, AttributeError and more.
        raise _misfit(f"its import fails: {type(error).__name__}: {error}") from error
    function = find_function(module, op)
    if function is None:
        raise _misfit(f"it has none of {', '.join(FUNCTION_NAMES[op])}")
    return function


def _invoke(op: str, device_index: int, *args, **kwargs) -> None:
    """Call the library's function for `op` with the device current.

    Raises:
        RuntimeError: another GPU has used the library before. It loads its kernels for one only,
            and would use the first one's handles.
    """
    global _home
    if _home not in (None, device_index):
        raise RuntimeError(
            "dgmoe_ops: DeepGEMM loads its kernels for one GPU a process; this process uses it on"
            f" cuda:{_home} and now asks for cuda:{device_index}: run one process a GPU"
        )
    if device_index >= 0 and device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            _call(op, *args, **kwargs)
    else:
        _call(op, *args, **kwargs)
    _home = device_index


def _call(op: str, *args, **kwargs) -> None:
    """Call the library's function for `op`; the first call that returns proves that it fits."""
    function = _proven.get(op)
    if function is not None:
        function(*args, **kwargs)
        return
    function = _resolve(op)
    try:
        function(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        wheel = fitting_wheel(torch.__version__)
        if wheel is not None and version() == f"{_DISTRIBUTIONS[0]} {wheel[0]}":
            raise  # the right wheel: the error is about this call
        raise _misfit(f"its first call fails: {type(error).__name__}: {error}") from error
    _proven[op] = function


# ---- what it takes: forms, recipes and sizes by architecture ----


def _refuse(op: str, arg: str, must: str, got: str) -> ValueError:
    return ValueError(f"dgmoe::{op}: {arg} must {must}, got {got}")


def scale_form_text(scale: torch.Tensor) -> str:
    """Name the form of a scale tensor by its dtype and strides."""
    packed = scale.dtype == torch.int32
    kind = "packed UE8M0 int32" if packed else str(scale.dtype).removeprefix("torch.")
    order = "MN-major" if scale.stride(-2) == 1 else "strided"
    if scale.is_contiguous():
        order = "row-major"
    return f"{kind} {order}, shape {tuple(scale.shape)}, strides {scale.stride()}"


def is_mn_major(scale: torch.Tensor) -> bool:
    """Tell whether columns are contiguous and start on 16 bytes, as TMA reads them."""
    *batch, rows, columns = scale.shape
    *batch_stride, row_stride, column_stride = scale.stride()
    leading = round_up(rows, TMA_ELEMENTS)
    if column_stride != leading or (row_stride != 1 and rows != 1):
        return False
    return not batch or batch_stride[0] == leading * columns


def with_tma_strides(scale: torch.Tensor) -> torch.Tensor:
    """View scales of one column or of one expert with the strides that TMA wants.

    The stride of a size-1 dimension is lost in copies and conversions, and the library insists.
    """
    *batch, rows, columns = scale.shape
    if rows % TMA_ELEMENTS or (rows != 1 and scale.stride(-2) != 1):
        return scale
    if columns != 1 and scale.stride(-1) != rows:
        return scale
    if batch and batch[0] != 1 and scale.stride(0) != rows * columns:
        return scale
    strides = (*[rows * columns] * len(batch), 1, rows)
    return scale if scale.stride() == strides else scale.as_strided(scale.shape, strides)


def check_scales(
    op: str,
    arch_major: int,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    recipe_a: Sequence[int] | None,
    recipe_b: Sequence[int] | None,
) -> dict[str, tuple[int, ...]]:
    """Check the forms that this architecture takes and return the recipe keywords to pass on.

    Raises:
        ValueError: a scale has another form, or a recipe does not run there. The library would copy
            or convert such scales on every call, padding rows included, or fail without a name.
    """
    if arch_major == 9:
        if a_scale.dtype != torch.float32:
            raise _refuse(op, "a_scale", "be float32 on SM90", scale_form_text(a_scale))
        if not is_mn_major(a_scale):
            must = "be MN-major and TMA-aligned on SM90 (dgmoe_ops.ops.align_scale makes it so)"
            raise _refuse(op, "a_scale", must, scale_form_text(a_scale))
        if b_scale.dtype != torch.float32 or not b_scale.is_contiguous():
            must = "be contiguous float32, one scale a 128x128 block, on SM90"
            raise _refuse(op, "b_scale", must, scale_form_text(b_scale))
        if recipe_a is not None and (tuple(recipe_a), tuple(recipe_b or ())) != _SM90_RECIPES:
            got = f"{tuple(recipe_a)} and {tuple(recipe_b or ())}"
            raise _refuse(op, "recipe_a and recipe_b", "be (1, 128) and (128, 128) on SM90", got)
        return {}
    if arch_major not in (10, 12):
        raise _refuse(op, "a", "be on an SM90, SM100 or SM120 device", f"SM{arch_major}0")
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale.dtype != torch.int32 or not is_mn_major(scale):
            must = f"be packed UE8M0 int32, MN-major, on SM{arch_major}0"
            helper = " (dgmoe_ops.ops.pack_ue8m0 makes it so)"
            raise _refuse(op, name, must + helper, scale_form_text(scale))
    if recipe_a is None or recipe_b is None:
        return {}
    return {"recipe_a": tuple(recipe_a), "recipe_b": tuple(recipe_b)}


def check_sizes(op: str, masked: bool, experts: int, m: int, n: int, k: int, element: int) -> None:
    """Check what the library's tiles and tensor maps need; `element` is the bytes of a value of a.

    Raises:
        ValueError: a size does not fit. The library would trap on the device, or write over the
            next expert's rows.
    """
    multiple = _K_MULTIPLE[element]
    if k % multiple:
        raise _refuse(op, "k", f"be a multiple of {multiple} on CUDA", str(k))
    if n % 8:
        raise _refuse(op, "n", "be a multiple of 8 on CUDA", str(n))
    if masked and experts > 1 and m % TILE_ROWS:
        # Whole tiles are stored; the last one of an expert must not reach into the next expert.
        raise _refuse(op, "a", f"have a multiple of {TILE_ROWS} rows an expert on CUDA", str(m))
    if not masked and m % CONTIG_ALIGNMENT:
        # The expert of each half tile is read from m_indices, also in the last tile.
        raise _refuse(op, "a", f"have a multiple of {CONTIG_ALIGNMENT} rows on CUDA", str(m))


@functools.cache
def _arch_major(device_index: int) -> int:
    return torch.cuda.get_device_capability(device_index)[0]


def _nothing_to_do(
    op: str, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, masked: bool
) -> bool:
    """Answer the empty cases, which the library refuses, and check the sizes of the others."""
    if d.numel() == 0:
        return True
    experts, n, k = b.shape
    if experts == 0:  # contiguous rows without experts are padding, all of them
        return True
    if k == 0:
        d.zero_()
        return True
    for name, tensor in (("a", a), ("b", b)):
        if tensor.data_ptr() % 16:
            raise _refuse(op, name, "start on 16 bytes on CUDA", "another address")
    check_sizes(op, masked, experts, a.shape[-2], n, k, a.element_size())
    return False


# ---- the kernels ----


def grouped_gemm_nt_f8f8bf16_masked(
    a, a_scale, b, b_scale, masked_m, expected_m, *, recipe_a=None, recipe_b=None
):
    op = "grouped_gemm_nt_f8f8bf16_masked"
    d = torch.ops.dgmoe._grouped_gemm_nt_f8f8bf16_masked_out.default(
        a, a_scale, b, b_scale, masked_m, expected_m, recipe_a=recipe_a, recipe_b=recipe_b
    )
    if _nothing_to_do(op, a, b, d, masked=True):
        return d
    index = a.get_device()
    a_scale = with_tma_strides(a_scale)
    recipes = check_scales(op, _arch_major(index), a_scale, b_scale, recipe_a, recipe_b)
    _invoke(op, index, (a, a_scale), (b, b_scale), d, masked_m, expected_m, **recipes)
    return d


def grouped_gemm_nt_f8f8bf16_contig(
    a, a_scale, b, b_scale, m_indices, *, recipe_a=None, recipe_b=None
):
    op = "grouped_gemm_nt_f8f8bf16_contig"
    d = torch.ops.dgmoe._grouped_gemm_nt_f8f8bf16_contig_out.default(
        a, a_scale, b, b_scale, m_indices, recipe_a=recipe_a, recipe_b=recipe_b
    )
    if _nothing_to_do(op, a, b, d, masked=False):
        return d
    index = a.get_device()
    a_scale = with_tma_strides(a_scale)
    recipes = check_scales(op, _arch_major(index), a_scale, b_scale, recipe_a, recipe_b)
    _invoke(op, index, (a, a_scale), (b, b_scale), d, m_indices, **recipes)
    return d


def grouped_gemm_nt_bf16_masked(a, b, masked_m, expected_m):
    op = "grouped_gemm_nt_bf16_masked"
    d = torch.ops.dgmoe._grouped_gemm_nt_bf16_masked_out.default(a, b, masked_m, expected_m)
    if not _nothing_to_do(op, a, b, d, masked=True):
        _invoke(op, a.get_device(), a, b, d, masked_m, expected_m)
    return d


def grouped_gemm_nt_bf16_contig(a, b, m_indices):
    op = "grouped_gemm_nt_bf16_contig"
    d = torch.ops.dgmoe._grouped_gemm_nt_bf16_contig_out.default(a, b, m_indices)
    if not _nothing_to_do(op, a, b, d, masked=False):
        _invoke(op, a.get_device(), a, b, d, m_indices)
    return d


def register() -> None:
    """Register the CUDA kernels of the grouped GEMM ops, once.

    DeepGEMM itself is imported by their first call.
    """
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("dgmoe", "FRAGMENT")
    for kernel in (
        grouped_gemm_nt_f8f8bf16_masked,
        grouped_gemm_nt_f8f8bf16_contig,
        grouped_gemm_nt_bf16_masked,
        grouped_gemm_nt_bf16_contig,
    ):
        _library.impl(kernel.__name__, kernel, "CUDA")


def describe(device: torch.device | str) -> str:
    """Say which backend runs a grouped GEMM on `device`, for people to read."""
    device = torch.device(device)
    if device.type == "cpu":
        return "dgmoe_ops CPU kernel"
    if device.type != "cuda":
        return f"no backend for {device.type}"
    return f"DeepGEMM ({version() or 'not installed'})"
