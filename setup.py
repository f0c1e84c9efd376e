"""Build the two libraries of dgmoe_ops: `_C` (schemas and CPU kernels) and, where nvcc is,
`_C_cuda` (CUDA kernels).

Both use libtorch's stable ABI at the 2.10 floor and no Python API, so one build serves every
PyTorch from 2.10 on and every Python from 3.10 on. No GPU is needed to build, and a CPU build of
PyTorch will do.

Environment: CUDA_HOME (where nvcc is looked for first), DGMOE_CUDA (a switch; off does not build
`_C_cuda`), DGMOE_CUDA_ARCHS (default "90a;100a;120a"), MAX_JOBS.
"""

import os
import runpy
import shutil
from pathlib import Path

from setuptools import setup

BUILDS_WITH = (2, 13)  # the oldest PyTorch whose headers have what the sources use
HINT = (
    "install it (pip install 'torch>=2.13'), then build in that environment:"
    " pip install --no-build-isolation <this package>"
)

try:
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        f"dgmoe_ops: building needs PyTorch 2.13 or newer, got none; {HINT}"
    ) from error
if tuple(map(int, torch.__version__.split(".")[:2])) < BUILDS_WITH:
    raise SystemExit(
        f"dgmoe_ops: building needs PyTorch 2.13 or newer, got {torch.__version__}; {HINT}"
    )

ROOT = Path(__file__).parent
# The package's own reader of switches, without importing the package, which needs the libraries.
switch = runpy.run_path(str(ROOT / "dgmoe_ops" / "config.py"))["switch"]
TORCH_FLOOR = "0x020a000000000000"  # 2.10
COMMON = [f"-DTORCH_TARGET_VERSION={TORCH_FLOOR}", "-DTORCH_STABLE_ONLY"]
# Contraction would let the compiler fuse a*b+c where it likes; the numerics fuse explicitly and
# nowhere else.
HOST = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-ffp-contract=off",
    # Without it GCC keeps the branches of the e4m3 rounding below AVX-512; no value changes.
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
]
DEVICE = [
    "-O3",
    "-std=c++17",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fvisibility=hidden",
]


def sources(suffix: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(f"*{suffix}"))


def cuda_home() -> str | None:
    """The toolkit to build with, or None where there is none or the caller declined it."""
    if not switch("DGMOE_CUDA", True):
        return None
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    return next(
        (home for home in candidates if home and (Path(home) / "bin" / "nvcc").exists()), None
    )


def headers() -> list[str]:
    return sources(".h") + sources(".cuh")


def room_of(path: str | Path) -> str:
    """The folder below csrc/ that a source, or an object made of one, belongs to; "" for others."""
    parts = Path(path).parts
    return parts[parts.index("csrc") + 1] if "csrc" in parts else ""


class BuildLibraries(BuildExtension):
    """An object folder a library: `<op>.cpp` and `<op>.cu` would otherwise overwrite each other's
    `<op>.o`."""

    def build_extension(self, ext):
        base = self.build_temp
        self.build_temp = str(Path(base) / ext.name)
        # Without CUDA in PyTorch its helper writes no dependency files for .cu: objects that a
        # changed header made stale are dropped here. A room includes itself and common.
        for built in Path(self.build_temp).glob("**/*.o"):
            used = [header for header in headers() if room_of(header) in (room_of(built), "common")]
            if built.stat().st_mtime < max((ROOT / header).stat().st_mtime for header in used):
                built.unlink()
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = base


def cpu_library() -> CppExtension:
    return CppExtension(
        "dgmoe_ops._C",
        sources(".cpp"),
        depends=headers(),
        extra_compile_args={"cxx": HOST + COMMON},
        py_limited_api=True,
    )


def cuda_library(home: str) -> CppExtension:
    # PyTorch's helper refuses CUDA when PyTorch itself has none; the stable ABI needs only its
    # headers, so point the helper at the toolkit and let it drive nvcc for the .cu sources of a
    # plain C++ extension.
    cpp_extension.CUDA_HOME = home
    archs = os.environ.get("DGMOE_CUDA_ARCHS", "90a;100a;120a").split(";")
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return CppExtension(
        "dgmoe_ops._C_cuda",
        sources(".cu"),
        depends=headers(),
        extra_compile_args={
            "cxx": HOST + COMMON,
            "nvcc": DEVICE + COMMON + ["-DUSE_CUDA", *gencode],
        },
        include_dirs=[str(Path(home) / "include")],
        library_dirs=[str(Path(home) / "lib64")],
        # libtorch.so must stay a NEEDED entry: its dependencies bring libtorch_cuda into lookup
        # scope at load time.
        extra_link_args=[
            "-lcudart_static",
            "-ldl",
            "-lrt",
            "-lpthread",
            "-Wl,--no-as-needed",
            "-ltorch",
            "-Wl,--as-needed",
        ],
        py_limited_api=True,
    )


def libraries() -> list[CppExtension]:
    home = cuda_home()
    if home is None:
        print("dgmoe_ops: no nvcc (set CUDA_HOME to change that): building the CPU library only")
        return [cpu_library()]
    print(f"dgmoe_ops: building the CPU library, and the CUDA library with {home}/bin/nvcc")
    return [cpu_library(), cuda_library(home)]


setup(
    ext_modules=libraries(),
    cmdclass={"build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
