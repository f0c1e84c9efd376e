"""JIT warm-up: make every call of the grouped GEMMs that a layer can make, before it serves.

DeepGEMM compiles a kernel at its first call, for seconds: one for each op, n, k, number of experts,
recipe and alignment, and for each tile that it chooses by m or expected_m. `warmup` makes those
calls with operands of its own, so that the kernels are in the library's cache folder and loaded
into this process. Processes that start together share the compiling out (`jit_cache.compile_once`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import _progress, config
from ..backends import platforms
from ..backends.deep_gemm import jit_cache
from ..backends.heuristics import gemm_plan
from ..formats.layouts import Layout
from ..weights.prepare import MoEWeights
from .operands import OpRunner, operand_bytes, weight_bytes
from .plan import (
    KernelCall,
    Layer,
    LayerShape,
    Span,
    check_layouts,
    halve_largest,
    layer_calls,
    layers_of,
    plan_warmup,
    spans_of,
)

__all__ = [
    "KernelCall",
    "LayerShape",
    "OpRunner",
    "Shrunk",
    "WarmupReport",
    "plan_warmup",
    "warmup",
]

_HEADROOM = 256 << 20  # left to the library's modules and to fragmentation


@dataclass(frozen=True)
class Shrunk:
    """Token counts that were not warmed up, because their operands do not fit in memory.

    Attributes:
        layer: its sizes, for people to read.
        layout: "masked" or "contig".
        asked, done: the largest token count that was asked for, and that fits.
        needed_bytes: what the largest call asked for takes.
        free_bytes: what was free.
    """

    layer: str
    layout: str
    asked: int
    done: int
    needed_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.layout} layout of {self.layer}: {self.asked} tokens need"
            f" {self.needed_bytes:,} bytes and {self.free_bytes:,} are free; warmed up to"
            f" {self.done} tokens only"
        )


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did.

    Attributes:
        calls: calls of grouped GEMMs.
        compiled: kernels that were new in the cache; processes that start together count each
            kernel once among them.
        loaded: calls whose kernel was compiled already.
        seconds: how long it took, with the waiting for other processes.
        shrunk: what did not fit in memory and was left out.
        cache_dir: the library's cache folder; None where nothing ran.
        note: what else there is to say.
    """

    calls: int = 0
    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0
    shrunk: tuple[Shrunk, ...] = ()
    cache_dir: str | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return self.note
        text = (
            f"{self.calls} calls, {self.compiled} kernels compiled, {self.loaded} calls from the"
            f" cache {self.cache_dir}, {self.seconds:.1f} s"
        )
        return "\n".join([text, *map(str, self.shrunk)])


# ---- memory ----


def _free_bytes(device: torch.device) -> int:
    """What this process can still allocate: the device's free memory and the allocator's."""
    free = torch.cuda.mem_get_info(device)[0]
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + kept - _HEADROOM)


def _needed(calls: Iterable[KernelCall], own: dict, arch: int | str) -> int:
    """Bytes of the largest of the calls, with its workspace, and with its weight where the layer
    brings none."""
    packed = _packed(arch)

    def needed(call: KernelCall) -> int:
        weight = 0 if call.weight in own else weight_bytes(call, packed)
        return weight + operand_bytes(call, packed) + gemm_plan(call.spec, arch).workspace_bytes

    return max(map(needed, calls), default=0)


def _packed(arch: int | str) -> bool:
    """Whether scales are packed UE8M0 there, where no weight says it."""
    return arch != "cpu" and arch >= 100


def _fit(
    layer: Layer,
    spans: list[Span],
    layout: Layout,
    alignment: int,
    own: dict,
    arch: int | str,
    free: int,
) -> tuple[list[KernelCall], Shrunk | None]:
    """The calls of a layer in a layout, with the largest token counts halved until they fit."""
    fitting = spans
    while True:
        calls = layer_calls(layer, fitting, layout, alignment)
        needed = _needed(calls, own, arch)
        if fitting is spans:
            asked = max((last for _, last in spans), default=0), needed
        done = max((last for _, last in fitting), default=0)
        if needed <= free:
            break
        if done <= 1:
            raise RuntimeError(
                f"dgmoe_ops.warmup: {layout} layout of {layer}: even {done} tokens need"
                f" {needed:,} bytes and {free:,} are free: give the layer's own weights (a module"
                f" or MoEWeights on the device), or other layouts than {layout}"
            )
        fitting = halve_largest(fitting)
    if fitting is spans:
        return calls, None
    return calls, Shrunk(str(layer), layout.value, asked[0], done, asked[1], free)


# ---- all of it ----


def _say(text: object) -> None:
    _progress.say(f"dgmoe_ops.warmup: {text}")


def _refuse_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dgmoe_ops.warmup: the current stream is capturing a graph, into which no kernel can be"
            " compiled or loaded: warm up before the capture"
        )


def _arch(device: torch.device) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"dgmoe_ops.warmup: device {device} needs a GPU and a CUDA PyTorch; torch"
            f' {torch.__version__} sees none (device="cpu" needs no warm-up)'
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"dgmoe_ops.warmup: device must be one of the {torch.cuda.device_count()} GPUs that"
            f" torch sees, got {device}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _identity(device: torch.device | None) -> str:
    """What compiled kernels depend on besides their calls."""
    parts = [torch.__version__, os.environ.get("CUDA_HOME", "")]
    for name in ("sgl-deep-gemm", "deep-gemm"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if device is not None:
        found = torch.cuda.get_device_properties(device)
        parts.append(f"{found.name} {found.major}.{found.minor} {found.multi_processor_count}")
    skipped = jit_cache.FOLDER_VARIABLE
    parts += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k[:3] == "DG_" and k != skipped]
    return "\n".join(parts)


def _own_weights(layers: Iterable[Layer], device: torch.device) -> dict:
    return {
        (layer.experts, n, k, layer.recipe.name): tensors
        for layer in layers
        for (n, k), tensors in zip(layer.gemms, layer.tensors, strict=False)
        if tensors[0].device == device
    }


def legal_layouts(
    arch: int | str, layer: Layer, wanted: Iterable[Layout] | None, own: dict, packed: bool
) -> tuple[Layout, ...]:
    """The layouts to warm a layer up in: the wanted ones, or all that its device runs.

    Raises:
        ValueError: the device does not run it, or not in a layout that is wanted.
    """
    form = layer.recipe.scale_layout_name(packed)
    weight = own.get((layer.experts, *layer.gemms[0], layer.recipe.name))
    if layer.recipe.quantized and weight is not None:
        form = layer.recipe.scale_layout_name(weight[1].dtype == torch.int32)
    legal = platforms.legal_layouts(arch, layer.recipe.name, form)
    found = tuple(wanted or legal or Layout)
    for layout in found:
        platforms.check(arch, layer.recipe.name, layout, form)
    return found


def _groups(calls: Iterable[KernelCall]) -> list[jit_cache.Group]:
    """Calls that may share kernels, the weights next to each other and the largest call first: the
    memory of a call then serves the ones after it."""
    groups: dict[tuple, list[KernelCall]] = {}
    for call in calls:
        groups.setdefault(call.group, []).append(call)
    ordered = sorted(groups.items(), key=lambda item: (item[1][0].weight, item[0][0]))
    return [
        jit_cache.Group(
            repr(key), sorted(found, key=lambda c: (c.spec.m, c.spec.expected_m), reverse=True)
        )
        for key, found in ordered
    ]


def warmup(
    what: MoEWeights | torch.nn.Module | LayerShape | Sequence,
    *,
    tokens: Sequence[int] | range,
    recipe: str | None = None,
    top_k: int | None = None,
    num_experts: int | None = None,
    layouts: Iterable[Layout | str] | None = None,
    alignment: int | None = None,
    device: torch.device | str = "cuda",
    cache_dir: str | os.PathLike | None = None,
    use_nvrtc: bool | None = None,
    progress: bool = True,
    runner: Callable[[KernelCall], object] | None = None,
    free_bytes: Callable[[], int] | None = None,
    list_kernels: Callable[[Path], set[str]] = jit_cache.kernels,
    lock_timeout: float = jit_cache.LOCK_TIMEOUT,
) -> WarmupReport:
    """Compile and load every kernel that the grouped GEMMs of a layer can need, before it serves.

    Start it in every process: those that start together share the compiling out, and each kernel is
    compiled once among them; with a full cache nothing is compiled.

    Args:
        what: `MoEWeights`, a module (every `MoEWeights` in an attribute, or in a list, tuple or
            dict there, and every pair of tensors w13, w2 or w13_weight, w2_weight), a
            `LayerShape`, or a list of these.
        tokens: token counts: a list, a range, or a pair (first, last), both ends included.
        recipe: "bf16", "fp8_block", "mxfp8" or "mxfp4". Default what the weights or the shape say.
        top_k: experts a token. Default what the shape, or the module or one above it, says.
        num_experts: over all ranks. Default as top_k, else the experts of the weights.
        layouts: "masked", "contig". Default every one that the device runs.
        alignment: rows to which segments of the contiguous layout are padded. Default 128, as the
            layer has it.
        device: a GPU. CPU kernels need no warm-up: then nothing is done.
        cache_dir: the library's cache folder, from now on in this process. Default
            `DGMOE_JIT_CACHE_DIR`.
        use_nvrtc: compile with NVRTC, or with nvcc, likewise. Default `DGMOE_JIT_NVRTC`.
        progress: show a bar where stderr is a terminal.
        runner: runs one call. Default `OpRunner`: the op itself.
        free_bytes: bytes that can be allocated. Default the device's.
        list_kernels: names of the kernels in a cache folder.
        lock_timeout: seconds to wait for another process that compiles.

    Returns:
        `WarmupReport`. Token counts whose operands do not fit in memory are halved until they do;
        the report and stderr name them.

    Raises:
        ValueError: an argument has the wrong type, size or value, or does not run on the device.
        RuntimeError: the device is not there, its stream is capturing, nothing fits in memory, or
            DeepGEMM is imported already with another folder or compiler.
        TimeoutError: another process held a lock for longer than lock_timeout.
    """
    started = time.perf_counter()
    device = torch.device(device)
    wanted, aligned = check_layouts(tuple(Layout) if layouts is None else layouts, alignment)
    spans = spans_of(tokens)
    layers = layers_of(what, recipe, top_k, num_experts)
    if device.type == "cpu":
        report = WarmupReport(note="CPU kernels are compiled already and need no warm-up")
        _say(report)
        return report
    if device.type != "cuda":
        raise ValueError(f"dgmoe_ops.warmup: device must be cuda or cpu, got {device}")
    _refuse_capture()
    on_gpu = runner is None or torch.cuda.is_available()
    arch = _arch(device) if on_gpu else "cpu"
    if on_gpu:
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    own = _own_weights(layers, device)
    chosen = [wanted] * len(layers)
    if runner is None:
        named = None if layouts is None else wanted
        chosen = [legal_layouts(arch, one, named, own, _packed(arch)) for one in layers]
        runner = OpRunner(device, _packed(arch), own)
    if free_bytes is None:
        free_bytes = functools.partial(_free_bytes, device) if on_gpu else lambda: sys.maxsize
    free = free_bytes()
    folder = config.jit_cache_dir() if cache_dir is None else cache_dir
    nvrtc = config.jit_nvrtc() if use_nvrtc is None else use_nvrtc
    cache = jit_cache.configure(folder, nvrtc)
    # The backend reads the variables when it imports the library; an argument goes before them.
    if cache_dir is not None:
        os.environ["DGMOE_JIT_CACHE_DIR"] = str(cache)
    if use_nvrtc is not None:
        os.environ["DGMOE_JIT_NVRTC"] = str(int(use_nvrtc))

    calls: dict[KernelCall, None] = {}
    shrunk: list[Shrunk] = []
    for layer, layouts_of_it in zip(layers, chosen, strict=True):
        for layout in layouts_of_it:
            fitting, less = _fit(layer, spans, layout, aligned, own, arch, free)
            calls.update(dict.fromkeys(fitting))
            if less is not None:
                shrunk.append(less)
                _say(less)

    with _progress.steps(len(calls), "compiling kernels", progress) as advance:

        def run(call: KernelCall) -> None:
            runner(call)
            if on_gpu:
                torch.cuda.synchronize(device)  # a failure then belongs to this call
            advance()

        compiled = jit_cache.compile_once(
            cache,
            _groups(calls),
            run,
            identity=_identity(device if on_gpu else None),
            timeout=lock_timeout,
            list_kernels=list_kernels,
        )
    if on_gpu:
        if isinstance(runner, OpRunner):
            runner.release()
        torch.cuda.empty_cache()
    return WarmupReport(
        calls=len(calls),
        compiled=compiled,
        loaded=max(0, len(calls) - compiled),
        seconds=time.perf_counter() - started,
        shrunk=tuple(shrunk),
        cache_dir=str(cache),
    )
