"""From a shape and a configuration to a compiled kernel, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...formats.gemm import GroupedGemmSpec
from . import kernel
from .tiles import Config

TARGET = GPUTarget("cuda", 90, 32)
_ALIGNED = ("a", "a_scale", "b", "b_scale", "masked_m", "m_indices", "d")


def _source(spec: GroupedGemmSpec, config: Config) -> ASTSource:
    function = kernel.masked_kernel if spec.masked else kernel.contig_kernel
    values = {
        "n": spec.n,
        "k": spec.k,
        "EXPERTS": triton.next_power_of_2(spec.experts),
        "FP4": spec.fp4,
        "A_GROUPS": 128 // spec.granularity_a[1],
        "BM": config.block_m,
        "BN": config.block_n,
        "EVEN_N": spec.n % config.block_n == 0,
        "STAGES": config.stages,
        "ASM": True,
    }
    types = {
        "a": "*fp8e4nv",
        "a_scale": "*i32",
        "b": "*u8" if spec.fp4 else "*fp8e4nv",
        "b_scale": "*i32",
        "masked_m": "*i32",
        "m_indices": "*i32",
        "d": "*bf16",
    }
    names = function.arg_names
    signature = {x: "constexpr" if x in values else types.get(x, "i32") for x in names}
    constants = {(i,): values[x] for i, x in enumerate(names) if x in values}
    attributes = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(names) if x in _ALIGNED}
    return ASTSource(function, signature, constants, attributes)


def compile_kernel(spec: GroupedGemmSpec, config: Config) -> triton.compiler.CompiledKernel:
    """Compile for SM90, or read from Triton's cache folder."""
    return triton.compile(
        _source(spec, config),
        target=TARGET,
        options={"num_warps": config.warps, "num_stages": config.stages},
    )


def programs(spec: GroupedGemmSpec, config: Config, resident: int) -> int:
    """Programs of a launch; `resident` is what the device holds at once."""
    n_tiles = -(-spec.n // config.block_n)
    if not spec.masked:
        return spec.m // 128 * n_tiles
    return min(resident, spec.experts * -(-spec.m // config.block_m) * n_tiles)


def arguments(spec, a, a_scale, b, b_scale, info, d):
    """A launch's arguments: those that the kernel takes, then a stand-in for each constant."""
    batch = a_scale.stride(0) if spec.masked else 0
    head = (a, a_scale, b, b_scale, info, d, spec.experts, spec.m, None, None)
    tail = (batch, a_scale.stride(-1), b_scale.stride(0), b_scale.stride(-1))
    return (*head, *tail, *[None] * (8 if spec.masked else 7))


def resident(compiled: triton.compiler.CompiledKernel, device: int) -> int:
    """Programs that a multiprocessor holds at once; loads the kernel."""
    compiled._init_handles()
    threads = 32 * compiled.metadata.num_warps
    registers = 65536 // (max(1, -(-compiled.n_regs // 8) * 8) * threads)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_multiprocessor", 228 << 10)
    programs = shared // (compiled.metadata.shared + 1024)
    return max(1, min(registers, programs, 2048 // threads, 32))


def launcher(spec: GroupedGemmSpec, config: Config, device: int, sms: int | None) -> Callable:
    """Load a kernel on the current device, and return what launches it on the current stream."""
    compiled = compile_kernel(spec, config)
    count = sms or torch.cuda.get_device_properties(device).multi_processor_count
    most = count * resident(compiled, device)
    launch = compiled[(programs(spec, config, most), 1, 1)]
    stream_of = torch._C._cuda_getCurrentRawStream
    fp4 = spec.fp4

    def call(a, a_scale, b, b_scale, info, d) -> None:
        b = b.view(torch.uint8) if fp4 else b
        given = arguments(spec, a, a_scale, b, b_scale, info, d)
        launch(*given, stream=stream_of(device))

    return call
