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
# In the order of numerics_device.cu.
FUNCTIONS = ("silu", "exp_f32", "sqrt_softplus", "tanh_f32")
ENCODERS = ("float_to_e4m3", "float_to_ue8m0", "exact_ue8m0", "float_to_e2m1", "e2m1_exponent")
DECODERS = ("e4m3_to_float", "ue8m0_to_float", "e2m1_to_float")


@pytest.fixture(scope="module")
def library(device, tmp_path_factory) -> ctypes.CDLL:
    """numerics_device.cu, compiled for this GPU."""
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
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def evaluate(library):
    """Returns (functions, codes) by the GPU, both by name."""

    def run(x: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        values = np.empty((len(FUNCTIONS), x.size), np.float32)
        codes = np.empty((len(ENCODERS), x.size), np.uint8)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, values, codes)]
        assert library.evaluate_on_device(pointers[0], x.size, *pointers[1:]) == 0
        return dict(zip(FUNCTIONS, values, strict=True)), dict(zip(ENCODERS, codes, strict=True))

    return run


def same(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Equal bits, or both NaN."""
    return (found.view(np.uint32) == expected.view(np.uint32)) | (
        np.isnan(found) & np.isnan(expected)
    )


def test_silu_of_every_bf16_value(evaluate, numerics, all_bf16) -> None:
    x = (all_bf16.astype(np.uint32) << 16).view(np.float32)
    assert same(evaluate(x)[0]["silu"], numerics.silu(x)).all()


def test_functions_and_encoders(evaluate, numerics, all_bf16) -> None:
    high = all_bf16.astype(np.uint32) << 16
    low = np.random.default_rng(0).integers(0, 1 << 16, (16, high.size), dtype=np.uint32)
    # Around every bf16 value too: there lie the ties and the powers of two.
    bits = np.concatenate([high, high + 1, high - 1, (high[None] | low).ravel()])
    functions, codes = evaluate(bits.view(np.float32))
    for name in FUNCTIONS[1:]:
        expected = getattr(numerics, name)(bits.view(np.float32))
        assert same(functions[name], expected).all(), name
    for name in ENCODERS:
        argument = bits & 0x7FFFFFFF if name == "e2m1_exponent" else bits
        np.testing.assert_array_equal(codes[name], getattr(numerics, name)(argument), name)


def test_decoders_of_every_byte(library, numerics) -> None:
    bits = np.empty((len(DECODERS), 256), np.uint32)
    assert library.decode_on_device(ctypes.c_void_p(bits.ctypes.data)) == 0
    codes = np.arange(256, dtype=np.uint8)
    for name, found in zip(DECODERS, bits, strict=True):
        np.testing.assert_array_equal(found, getattr(numerics, name)(codes), name)
