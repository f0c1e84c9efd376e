"""Which kernel ran each stage of the layer, read from a profiler's trace."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

_STAGES = {
    "moe_ep_deepgemm_preprocess": "2b quantise and place",
    "moe_dispatch_index": "2b quantise and place",
    "quant_group_fp8": "2b quantise and place",
    "ep_scatter": "2b quantise and place",
    "grouped_gemm": "3, 5 grouped GEMMs",
    "silu_and_mul": "4 activation",
    "post_reorder_deepgemm": "6 combine",
    "ep_gather": "6 combine",
}


@dataclass
class StageRow:
    """One op of the layer: how often it ran, how long, and the device kernels that it launched."""

    stage: str
    op: str
    calls: int = 0
    milliseconds: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)


def stage_of(op: str) -> str | None:
    """Return the stage of an op by its name, or None for others, such as the layer itself."""
    return next((stage for prefix, stage in _STAGES.items() if op.startswith(prefix)), None)


def record(run: Callable[[], object], device: torch.device) -> list[StageRow]:
    """Run once under the profiler, which also sees the ops inside the opaque layer."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read at the first trace: silences its log
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities) as trace:
        run()
        if on_cuda:
            torch.cuda.synchronize(device)
    rows: dict[str, StageRow] = {}
    for event in trace.events():
        space, _, op = event.name.partition("::")
        if space != "dgmoe" or (stage := stage_of(op)) is None:
            continue
        row = rows.setdefault(op, StageRow(stage, op))
        row.calls += 1
        row.milliseconds += (event.device_time_total if on_cuda else event.cpu_time_total) / 1e3
        row.kernels.update(kernel.name for kernel in event.kernels)
    return sorted(rows.values(), key=lambda row: row.stage)


def deep_gemm_name(device: torch.device) -> str:
    """What the package says of its DeepGEMM on this device."""
    if importlib.util.find_spec("dgmoe_ops.backends.deep_gemm") is None:
        return "DeepGEMM"
    from dgmoe_ops.backends import deep_gemm

    return str(deep_gemm.describe(device)) if hasattr(deep_gemm, "describe") else "DeepGEMM"


def backend_of(row: StageRow, device: torch.device) -> str:
    """Say who ran a row: by its kernels' names on CUDA, by the dispatcher's table on CPU."""
    if device.type != "cuda":
        key = torch._C.DispatchKey.CPU
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"dgmoe::{row.op}", key)
        threads = torch.get_num_threads()
        return f"dgmoe CPU kernel, {threads} threads" if has_kernel else "PyTorch composite"
    owners = []
    for kernel in row.kernels:
        if "deep_gemm" in kernel:
            owner = deep_gemm_name(device)
        elif "dgmoe" in kernel:
            owner = "dgmoe CUDA kernel"
        else:
            owner = "PyTorch"
        owners.append(owner)
    return ", ".join(dict.fromkeys(owners)) or "no kernel seen"
