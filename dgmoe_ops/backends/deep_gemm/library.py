"""The library itself: imported at the first call, proven to fit by one checked product."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import torch

from ... import config
from ...formats.layout import Layout
from ...formats.recipes import Granularity
from .. import scopes
from ..request import OPS, Request
from . import jit_cache, overlap, switches
from .versions import misfit, version

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
    "gemm_nt_f8f8bf16": ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
    "gemm_nt_mxfp8_f8f8bf16": ("fp8_fp4_gemm_nt",),
    "gemm_nt_bf16bf16f32": ("bf16_gemm_nt",),
    "tf32_hc_prenorm_gemm": ("tf32_hc_prenorm_gemm",),
}
assert tuple(FUNCTION_NAMES) == OPS

_PROOF_SIZE = 128
_lock = threading.RLock()
_module: ModuleType | None = None  # once it is proven
_home: int | None = None  # the GPU that the library's loaded kernels belong to


def find_function(module: ModuleType, op: str) -> Callable | None:
    """Find the library's function for `op` under any of its names."""
    return next((getattr(module, n) for n in FUNCTION_NAMES[op] if hasattr(module, n)), None)


def load() -> ModuleType:
    """Import the library.

    Raises:
        RuntimeError: it is missing, or a build for another torch; the message names what fits.
    """
    if jit_cache.LIBRARY not in sys.modules:
        # It reads its cache folder and compiler from the environment, when it is imported.
        jit_cache.configure(config.jit_cache_dir(), config.jit_nvrtc())
    try:
        return importlib.import_module(jit_cache.LIBRARY)
    except ModuleNotFoundError as error:
        missing = (
            "not installed" if error.name == jit_cache.LIBRARY else f"its import fails: {error}"
        )
        raise misfit(missing) from error
    except Exception as error:
        # A wheel for another torch fails as OSError, RuntimeError, AttributeError and more.
        raise misfit(f"its import fails: {type(error).__name__}: {error}") from error


def prove(module: ModuleType, device: torch.device) -> None:
    """Multiply two small integer matrices by the library and compare with what is right.

    A wheel for another torch can import and still read tensors wrongly, so versions alone prove
    nothing. Waits for the device, once a process.

    Raises:
        RuntimeError: the product fails or is wrong; the message names the wheel that fits.
    """
    function = find_function(module, "gemm_nt_bf16bf16f32")
    if function is None:
        names = ", ".join(FUNCTION_NAMES["gemm_nt_bf16bf16f32"])
        raise misfit(f"it has none of {names}")
    steps = torch.arange(_PROOF_SIZE * _PROOF_SIZE, device=device).view(_PROOF_SIZE, _PROOF_SIZE)
    a, b = ((steps * factor) % 5 - 2 for factor in (3, 7))
    d = torch.full((_PROOF_SIZE, _PROOF_SIZE), float("nan"), device=device)
    right = (a.double() @ b.double().T).float()  # integers below 2^9: exact in any order
    try:
        function(a.bfloat16(), b.bfloat16(), d)
        equal = torch.equal(d, right)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise misfit(f"its first product fails: {type(error).__name__}: {error}") from error
    if not equal:
        raise misfit("its first product is wrong")


def proven(device: torch.device) -> ModuleType:
    """The library, imported and proven to fit."""
    global _module
    if _module is None:
        with _lock:
            if _module is None:
                module = load()
                prove(module, device)
                _module = module
    return _module


@functools.cache
def arch_major(device_index: int) -> int:
    return torch.cuda.get_device_capability(device_index)[0]


def _keep_home(device_index: int) -> None:
    """Hold the library to the GPU that it was first used on.

    It loads its kernels for one only, and would use the first one's handles.
    """
    global _home
    if _home not in (None, device_index):
        raise RuntimeError(
            "dgmoe_ops: DeepGEMM loads its kernels for one GPU a process; this process uses it on"
            f" cuda:{_home} and now asks for cuda:{device_index}: run one process a GPU"
        )
    _home = device_index


def call(request: Request, recipes: dict[str, Granularity]) -> tuple[ModuleType, Callable]:
    """Call the library's function for a checked request; return the library and the function.

    Raises:
        RuntimeError: no library that fits, one without this function, or another GPU has used it.
    """
    index = request.operands.a.get_device()
    _keep_home(index)
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _call(request, recipes)
    return _call(request, recipes)


def _call(request: Request, recipes: dict[str, Granularity]) -> tuple[ModuleType, Callable]:
    module = proven(request.operands.a.device)
    function = find_function(module, request.op)
    if function is None:
        raise misfit(f"it has none of {', '.join(FUNCTION_NAMES[request.op])}")
    args, kwargs = arguments(request)
    kwargs = {**kwargs, **recipes}
    _refuse_unknown(function, request.op, recipes)
    settings = scopes.settings_of(request)
    with switches.applied(module, settings), overlap.arguments(function, request) as more:
        more.result = function(*args, **kwargs, **more.kwargs)
    return module, function


def arguments(request: Request) -> tuple[tuple, dict]:
    """The arguments that every release takes for an op, recipes aside."""
    x, layout = request.operands, request.spec.layout
    if request.op == "tf32_hc_prenorm_gemm":
        return (x.a, x.b, x.d, x.sqr_sum, request.num_splits), {}
    a, b = (x.a, x.b) if x.a_scale is None else ((x.a, x.a_scale), (x.b, x.b_scale))
    if layout is Layout.MASKED:
        return (a, b, x.d, x.info, request.spec.expected_m), {}
    if layout is Layout.CONTIG:
        return (a, b, x.d, x.info), {}
    if request.op == "gemm_nt_mxfp8_f8f8bf16":
        return (a, b, x.d), {"disable_ue8m0_cast": True}
    return (a, b, x.d), {}


def _refuse_unknown(function: Callable, op: str, recipes: dict[str, Granularity]) -> None:
    """Refuse recipes that the installed release cannot be told."""
    if recipes and lacking(function, ("recipe_a",), unknown=()):
        raise RuntimeError(
            f"dgmoe::{op}: {version() or 'the installed DeepGEMM'} takes no recipe_a and recipe_b;"
            " sgl-deep-gemm from 0.1.5 on does"
        )


def lacking(
    function: Callable, names: tuple[str, ...], unknown: tuple[str, ...]
) -> tuple[str, ...]:
    """Those of `names` that a function does not take by keyword; `unknown` where it does not tell,
    as built-in functions do not."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return unknown
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ()
    return tuple(name for name in names if name not in parameters)
