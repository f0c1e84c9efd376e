"""Load the compiled libraries: `_C` everywhere, `_C_cuda` where PyTorch has CUDA."""

from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_FLOOR = (2, 10)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"dgmoe_ops: {path.name} does not load under torch {torch.__version__}: {error}"
        ) from error


def load_libraries() -> tuple[str, ...]:
    """Load what this PyTorch can use and return the names of the loaded files.

    Raises ImportError where PyTorch is older than 2.10 or `_C` was never built. A CUDA PyTorch
    without `_C_cuda` is legal (a CPU-only build); the CUDA ops then say so when they are called.
    """
    if _version() < _FLOOR:
        raise ImportError(f"dgmoe_ops needs torch 2.10 or newer, got {torch.__version__}")
    core = _FOLDER / "_C.abi3.so"
    if not core.exists():
        raise ImportError(
            f"dgmoe_ops: {core} is missing: build it with `pip install --no-build-isolation -e .`"
        )
    loaded = [core]
    _load(core)
    cuda = _FOLDER / "_C_cuda.abi3.so"
    if torch.version.cuda is not None and cuda.exists():
        _load(cuda)
        loaded.append(cuda)
    return tuple(path.name for path in loaded)


LIBRARIES = load_libraries()
