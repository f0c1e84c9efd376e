"""What ops say where there is not enough memory: the op, the argument, the bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BF16, CAN_BUILD, F8, int32

from dgmoe_ops.backends import entry

HERE = Path(__file__).parent
dgmoe = torch.ops.dgmoe


def wide(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element seen as many."""
    return torch.zeros(1, 1, dtype=dtype, device=device).expand(rows, columns)


#: op, what is asked for, its bytes and the call: more than any machine has, and than int32 counts
HUGE = [
    ("moe_ep_deepgemm_preprocess", "rows", 2**50, lambda d: dgmoe.moe_ep_deepgemm_preprocess(
        torch.zeros(1, 8, dtype=BF16, device=d), int32([[0]], d), 2**10, m_max=2**15,
        padded_k=2**25)),
    ("ep_scatter", "x", 2**56, lambda d: dgmoe.ep_scatter(
        wide(2**24, 2**31, BF16, d), None, int32([[0]], d).expand(2**24, 1), 3)),
    ("quant_group_fp8", "q", 2**61 - 2**30, lambda d: dgmoe.quant_group_fp8(
        torch.zeros(2**30, 0, dtype=BF16, device=d), 128, 1, padded_k=2**31 - 1)),
    ("pack_ue8m0", "packed", 2**52, lambda d: dgmoe.pack_ue8m0(
        wide(2**40, 2**12, torch.float32, d))),
    ("align_scale", "scale", 2**54, lambda d: dgmoe.align_scale(
        wide(2**40, 2**12, torch.float32, d))),
    ("quant_mxfp8", "weight", 2**55, lambda d: dgmoe.quant_mxfp8(wide(2**30, 2**24, BF16, d))),
    ("requant_block_ue8m0", "weight", 2**56, lambda d: dgmoe.requant_block_ue8m0(
        wide(2**28, 2**28, F8, d), wide(2**21, 2**21, torch.float32, d))),
    ("silu_and_mul", "gate_up", 2**60, lambda d: dgmoe.silu_and_mul(wide(2**30, 2**29, BF16, d))),
    ("post_reorder_deepgemm", "out", 2**58, lambda d: dgmoe.post_reorder_deepgemm(
        torch.zeros(1, 2**27, dtype=BF16, device=d), int32([[0]], d)[:, :0].expand(2**30, 0),
        torch.ones(1, 0, device=d).expand(2**30, 0))),
    ("gemm_nt_bf16bf16f32", "out", 2**62, lambda d: dgmoe.gemm_nt_bf16bf16f32(
        torch.zeros(2**30, 0, dtype=BF16, device=d), torch.zeros(2**30, 0, dtype=BF16, device=d))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arg", "count", "call"), HUGE, ids=[one[0] for one in HUGE])
def test_the_request_is_named(device, name: str, arg: str, count: int, call) -> None:
    expected = torch.OutOfMemoryError if device.type == "cuda" else RuntimeError
    with pytest.raises(expected) as caught:
        call(device)
    text = f"dgmoe::{name}: {arg} must fit into the memory of {device.type}"
    assert str(caught.value).startswith(text), caught.value
    assert f"got {count} bytes for (" in str(caught.value)
    assert device.type == "cpu" or "out of memory" in str(caught.value)


def test_a_size_that_no_integer_holds_is_refused(device) -> None:
    packed = torch.zeros(1, 1, 1, dtype=torch.int32, device=device).expand(2**20, 2**20, 2**20)
    with pytest.raises(ValueError, match="dgmoe::unpack_ue8m0: scale must take fewer than 2"):
        dgmoe.unpack_ue8m0(packed, 2**22)


LIMITED = """
import resource, torch, dgmoe_ops
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, size + 2**30))
ids = torch.zeros(1, 1, dtype=torch.int32)
for experts in (2**29, 2**27):
    try:
        torch.ops.dgmoe.moe_dispatch_index(ids, experts, 1)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_tensors_and_workspaces_of_the_host_are_named() -> None:
    command = [sys.executable, "-c", LIMITED]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    tensor, workspace = done.stdout.splitlines()
    assert re.fullmatch(
        r"RuntimeError dgmoe::moe_dispatch_index: masked_m must fit into the memory of cpu,"
        rf" got {2**31} bytes for \({2**29}\) of int32",
        tensor,
    )
    assert workspace == (
        "RuntimeError dgmoe::moe_dispatch_index: last tokens must fit into the memory of the host,"
        f" got {2**30} bytes"
    )


# ---- the type of the error on CUDA ----


@pytest.fixture(scope="module")
def out_of_memory(tmp_path_factory: pytest.TempPathFactory):
    """An op that throws what the CUDA library throws."""
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if cxx is None or not CAN_BUILD:
        pytest.skip("needs a C++ compiler and the headers of PyTorch 2.13")
    torch_folder = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("out_of_memory") / "out_of_memory.so"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
    flags += [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    source = str(HERE / "out_of_memory.cpp")
    links = [f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", "-ldl"]
    command = [cxx, *flags, source, *links, "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    torch.ops.load_library(str(library))
    return torch.ops.dgmoe_test.out_of_memory


def test_python_sees_the_error_of_torch(out_of_memory) -> None:
    x = torch.ones(2)
    compiled = torch.compile(lambda x: out_of_memory(x), backend="eager")
    for call in (out_of_memory, out_of_memory.default, compiled):
        with pytest.raises(torch.OutOfMemoryError, match="^no room$"):
            call(x)


def test_an_error_of_a_library_keeps_its_kind() -> None:
    """The CUDA library makes it the same error again."""
    kinds = {
        torch.OutOfMemoryError("full"): b"Mfull",
        ValueError("x"): b"Vx",
        RuntimeError("y"): b"Ry",
    }
    for error, expected in kinds.items():
        assert bytes(entry._report(error).tolist()) == expected


def test_an_op_recovers(device) -> None:
    """The limit of the caching allocator is what serving runs into."""
    if device.type != "cuda":
        pytest.skip("limits CUDA's allocator")
    x = torch.zeros(2**14, 2**12, dtype=BF16, device=device)
    torch.cuda.empty_cache()
    device = x.device  # with its index
    total = torch.cuda.get_device_properties(device).total_memory
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction((reserved + 2**21) / total, device)
    try:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"quant_group_fp8: q must .* got 67108864"
        ):
            dgmoe.quant_group_fp8(x, 128, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    q, _ = dgmoe.quant_group_fp8(x, 128, 1)
    assert (q.float() == 0).all()
