"""numerics.h on a GPU: the bits of the host, for every bf16 input and many fp32 ones."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def evaluate(device, tmp_path_factory):
    """Returns silu, exp_f32, sqrt_softplus, tanh_f32, float_to_e4m3, float_to_ue8m0 by the GPU."""
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    nvcc = shutil.which("nvcc") or shutil.which(home / "bin" / "nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    library = tmp_path_factory.mktemp("numerics_device") / "numerics_device.so"
    # The flag that matters for the numbers is that of setup.py.
    command = [nvcc, "-O3", "-std=c++17", "-fmad=false", "-arch=native", "-shared"]
    command += ["-Xcompiler=-fPIC", str(HERE / "numerics_device.cu"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    function = ctypes.CDLL(str(library)).evaluate_on_device

    def run(x: np.ndarray) -> tuple[np.ndarray, ...]:
        outputs = [np.empty(x.size, dtype) for dtype in ("f4", "f4", "f4", "f4", "u1", "u1")]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, *outputs)]
        assert function(pointers[0], x.size, *pointers[1:]) == 0
        return tuple(outputs)

    return run


def same(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Equal bits, or both NaN."""
    return (found.view(np.uint32) == expected.view(np.uint32)) | (
        np.isnan(found) & np.isnan(expected)
    )


def test_silu_of_every_bf16_value(evaluate, numerics, all_bf16) -> None:
    x = (all_bf16.astype(np.uint32) << 16).view(np.float32)
    assert same(evaluate(x)[0], numerics.silu(x)).all()


def test_the_codecs_and_exp(evaluate, numerics, all_bf16) -> None:
    high = all_bf16.astype(np.uint32) << 16
    low = np.random.default_rng(0).integers(0, 1 << 16, (16, high.size), dtype=np.uint32)
    bits = np.concatenate([high, (high[None] | low).ravel()])
    x = bits.view(np.float32)
    _, exponential, softplus, hyperbolic, code, exponent = evaluate(x)
    assert same(exponential, numerics.exp_f32(x)).all()
    assert same(softplus, numerics.sqrt_softplus(x)).all()
    assert same(hyperbolic, numerics.tanh_f32(x)).all()
    np.testing.assert_array_equal(code, numerics.float_to_e4m3(bits))
    np.testing.assert_array_equal(exponent, numerics.float_to_ue8m0(bits))
