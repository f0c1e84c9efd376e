"""Who may look at whom: what keeps rooms and floors apart, read from includes and imports."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "dgmoe_ops"
ROOMS = ("scale", "weights", "route", "permute", "gemm", "activation", "combine")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# A header of common/ may include only what stands to its left. parallel.h is to the CPU what
# cuda.cuh is to CUDA.
COMMON_MAY_INCLUDE = {
    "numerics.h": set(),
    "env.h": set(),
    "sm90.cuh": set(),
    "scan.cuh": set(),
    "layout.h": {"numerics.h"},
    "tensor.h": {"numerics.h", "layout.h"},
    "sanity.h": {"numerics.h", "env.h", "layout.h", "tensor.h"},
    "check.h": {"numerics.h", "layout.h", "tensor.h", "sanity.h"},
    "out_of_memory.h": set(),
    "allocate.h": {"numerics.h", "layout.h", "tensor.h", "check.h"},
    "output.h": {"numerics.h", "layout.h", "tensor.h", "check.h", "allocate.h"},
    "parallel.h": {"numerics.h", "layout.h", "tensor.h", "check.h"},
    "contract.h": {"numerics.h", "layout.h", "tensor.h"},
    "cuda.cuh": {"numerics.h", "env.h", "sm90.cuh", "layout.h", "tensor.h", "sanity.h", "check.h"},
    "sanity.cuh": {"sanity.h", "allocate.h", "cuda.cuh"},
}
TORCH_FREE = ("numerics.h", "layout.h", "sm90.cuh", "scan.cuh")
MAX_LINES = 400

# A part may import itself and what this table names; parts are the modules or folders of dgmoe_ops.
MAY_IMPORT = {
    "_load": set(),
    "_progress": set(),
    "_sanity": set(),
    "config": {"formats"},
    "formats": {"config"},
    "ops": {"config", "formats"},
    "weights": {"formats", "ops", "_progress", "_sanity"},
    "backends": {"config", "formats", "_sanity"},
    "layer": {"config", "formats", "ops", "weights", "backends", "_sanity"},
    "checkpoints": {"formats", "weights", "backends", "_progress"},
    "analysis": {"_load", "config", "formats", "weights", "backends"},
    "warmup": {"config", "formats", "weights", "ops", "backends", "analysis", "_progress"},
    "dispatch": {"config", "formats", "ops", "weights", "layer"},
    "reference": set(),
    "testing": {"config", "formats", "ops", "weights", "layer", "reference"},
}
# These look at all of the package, and no part looks at them.
SEES_ALL = ("__init__", "__main__", "cli")


def source_files(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def includes(path: Path) -> list[tuple[str, str]]:
    return INCLUDE.findall(path.read_text())


def resolved(path: Path, target: str) -> Path:
    return (path.parent / target).resolve()


@pytest.mark.parametrize("path", source_files(CSRC / "common", ".h", ".cuh"), ids=lambda p: p.name)
def test_common_only_looks_left(path: Path) -> None:
    allowed = COMMON_MAY_INCLUDE.get(path.name)
    assert allowed is not None, f"{path.name} has no place in COMMON_MAY_INCLUDE"
    for quote, target in includes(path):
        if quote == '"':
            assert target in allowed, f"common/{path.name} may not include {target}"
        if path.name in TORCH_FREE:
            assert not target.startswith(("torch", "ATen", "c10")), f"{path.name}: {target}"


def room_of(path: Path) -> str:
    """A room may have folders of its own."""
    return path.relative_to(CSRC).parts[0]


def test_rooms_include_only_themselves_and_common() -> None:
    for path in source_files(CSRC, ".h", ".cuh", ".cpp", ".cu"):
        room = room_of(path)
        if room == "common":
            continue
        assert room in ROOMS, f"{path}: no such room"
        for quote, target in includes(path):
            if quote == '"':
                assert resolved(path, target).exists(), f"{path}: {target} does not exist"
                assert room_of(resolved(path, target)) in (room, "common"), f"{path}: {target}"


def test_each_side_keeps_to_its_headers() -> None:
    """`.cpp` and the contracts know no CUDA, `.cu` knows no CPU threading."""
    for path in source_files(CSRC, ".h", ".cpp", ".cu"):
        names = {Path(target).name for _, target in includes(path)}
        if path.suffix != ".cu":
            assert not names & {"cuda.cuh", "cuda_runtime.h"}, path
        else:
            assert "parallel.h" not in names, path


def test_ops_come_as_triples() -> None:
    for path in source_files(CSRC, ".cpp", ".cu"):
        # Code that several ops share is no op; it belongs to the header without its suffix. What
        # stands in a folder of a room is such code.
        if path.parent.parent != CSRC:
            assert any(path.with_suffix(suffix).exists() for suffix in (".h", ".cuh")), (
                f"{path} has no header"
            )
            continue
        stem = path.stem.removesuffix("_cpu").removesuffix("_cuda")
        if stem != path.stem and path.with_name(stem + ".cuh").exists():
            continue
        assert path.with_name(stem + ".h").exists(), f"{path} has no contract header"
        if path.suffix == ".cu" and stem == path.stem:
            assert path.with_suffix(".cpp").exists(), f"{path} has no CPU side"


def test_only_tensor_and_cuda_touch_raw_shims() -> None:
    shim = re.compile(r"\baoti_torch_(?!device_type_)\w+\s*\(")
    for path in source_files(CSRC, ".h", ".cuh", ".cpp", ".cu"):
        if path.name not in ("tensor.h", "cuda.cuh", "check.h", "allocate.h"):
            assert not shim.search(path.read_text()), f"{path} calls a raw shim"


def test_device_primitives_are_written_once() -> None:
    """The PTX of synchronisation and data movement, and sums over lanes, have one home each."""
    moves = re.compile(r"mbarrier|cp\.async|barrier\.c|fence|setmaxnreg|mapa|matrix|wgmma|shared")
    for path in source_files(CSRC, ".cuh", ".cu"):
        text = path.read_text()
        for statement in re.findall(r"\basm(?: volatile)?\((.*?)\);", text, re.DOTALL):
            allowed = path.name == "sm90.cuh" or (path.name == "wgmma.cuh" and "fence" not in text)
            assert allowed or not moves.search(statement), f"{path}: {statement}"
        assert "__shfl_up_sync" not in text or path.name == "scan.cuh", path


def part_of(module: str) -> str:
    """The part of the package that a dotted module name below dgmoe_ops belongs to."""
    return module.split(".")[0] if module else "__init__"


def imported_modules(path: Path) -> list[tuple[str, bool]]:
    """(absolute module name, at module level) of everything that a file imports."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(scope)
    }
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = []
    for node in ast.walk(tree):
        top = id(node) not in lazy
        if isinstance(node, ast.Import):
            found += [(alias.name, top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` names modules, `from .x import y` names things of one.
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += [(name, top) for name in (names if not node.module else [module])]
    return found


def package_imports(path: Path) -> list[str]:
    """What a file imports of the package, below dgmoe_ops."""
    prefix = "dgmoe_ops"
    return [
        module[len(prefix) + 1 :]
        for module, _ in imported_modules(path)
        if module == prefix or module.startswith(prefix + ".")
    ]


@pytest.mark.parametrize(
    "path", source_files(PACKAGE, ".py"), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_python_parts_look_only_where_they_may(path: Path) -> None:
    part = part_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    for module, _ in imported_modules(path):
        assert module.split(".")[0] not in ("tests", "benchmarks"), f"{path} imports {module}"
    if part in SEES_ALL:
        return
    assert part in MAY_IMPORT, f"dgmoe_ops.{part} has no place in MAY_IMPORT"
    for module in package_imports(path):
        target = part_of(module)
        if target == part:
            continue
        # A backend is light: what it wraps, it imports when it is first called (tested below).
        backend = target == "backends" and path == PACKAGE / "ops" / "gemm.py"
        assert target in MAY_IMPORT[part] or backend, f"dgmoe_ops.{part} imports {module}"


def test_backends_are_peers() -> None:
    """They share what stands above them; only `entry` knows them all."""
    folder = PACKAGE / "backends"
    backends = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert backends == {"deep_gemm", "triton"}
    for path in source_files(folder, ".py"):
        own = path.relative_to(folder).parts[0]
        if own == "entry.py":
            continue
        for module in package_imports(path):
            parts = module.split(".")
            if parts[0] == "backends" and len(parts) > 1 and parts[1] in backends:
                assert parts[1] == own, f"{path} imports {module}"


def test_the_oracle_imports_torch_only() -> None:
    for path in source_files(PACKAGE / "reference", ".py"):
        for module, _ in imported_modules(path):
            known = module.split(".")[0] in ("torch", *sys.stdlib_module_names)
            assert known or module.startswith("dgmoe_ops.reference"), f"{path.name}: {module}"


def test_what_is_optional_is_imported_lazily() -> None:
    kernels = [PACKAGE / "backends" / "triton" / name for name in ("kernel.py", "compiled.py")]
    for path in source_files(PACKAGE, ".py"):
        for module, top in imported_modules(path):
            if path in kernels and module.split(".")[0] == "triton":
                continue  # they are imported lazily themselves
            if module.split(".")[0] in ("deep_gemm", "triton", "transformers", "safetensors"):
                assert not top, f"{path} imports {module} when it is imported"


def test_files_stay_readable() -> None:
    """Advice: past so many lines, look for a second thing in the file."""
    folders = [CSRC, PACKAGE, ROOT / "tests", ROOT / "benchmarks"]
    for folder in folders:
        for path in source_files(folder, ".h", ".cuh", ".cpp", ".cu", ".py"):
            lines = len(path.read_text().splitlines())
            if lines > MAX_LINES:
                warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines", stacklevel=1)
