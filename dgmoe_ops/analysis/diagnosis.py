"""What follows from the facts of a machine: what runs there, what is missing and what mends it."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends import deep_gemm, platforms
from ..formats.layouts import Layout
from .machine import Machine

_TOOLKIT = "https://developer.nvidia.com/cuda-downloads"
_BUILD = "pip install --no-build-isolation -e ."
#: what the kernels of dgmoe_ops do not take; `csrc/gemm/heuristics.h` has the rule
TRITON_RUNS = (
    "what these do not take: beyond sm90_mx_small_m, slabs or segments of more than 8 GiB of"
    " workspace and weights whose rows are no multiple of 8; and calls under DGMOE_SANITY_CHECK=1"
)


@dataclass(frozen=True)
class Problem:
    """Something that is missing, and the command that mends it.

    Attributes:
        what: in one sentence.
        fix: a command, or what to do where no command does it.
        blocks: whether the layer cannot run on the GPUs (or at all) because of it.
    """

    what: str
    fix: str
    blocks: bool


def install_command(machine: Machine) -> str | None:
    """The command that installs the DeepGEMM that fits; None where no wheel is known to."""
    wheel = deep_gemm.fitting_wheel(machine.torch)
    if wheel is None:
        return None
    return " ".join(["pip install", f"sgl-deep-gemm=={wheel[0]}", *wheel[1]])


def deep_gemm_fits(machine: Machine) -> bool | None:
    """Whether the installed DeepGEMM is the one that fits this torch; None where that is unknown.

    Unknown is a torch that no wheel is known for, and a DeepGEMM that was built from its sources.
    """
    if machine.deep_gemm is None:
        return False
    wheel = deep_gemm.fitting_wheel(machine.torch)
    if wheel is None or not machine.deep_gemm.startswith("sgl-deep-gemm "):
        return None
    pinned = all(version == pin.split("==")[1] for pin, version in machine.pins.items())
    return machine.deep_gemm == f"sgl-deep-gemm {wheel[0]}" and pinned


def _gpu_problems(machine: Machine) -> list[Problem]:
    """What keeps the visible GPUs from running the layer."""
    problems = []
    if "_C_cuda.abi3.so" not in machine.libraries:
        fix = f"CUDA_HOME=/usr/local/cuda {_BUILD}" if machine.nvcc is None else _BUILD
        what = "the CUDA library _C_cuda.abi3.so is not built: no op runs on a GPU"
        problems.append(Problem(what, fix, True))
    fits = deep_gemm_fits(machine)
    command = install_command(machine)
    known = ", ".join(f"{a}.{b}" for a, b in sorted(deep_gemm.WHEELS))
    if not fits and command is None:
        found = machine.deep_gemm or "none installed"
        what = f"no DeepGEMM wheel is known to fit torch {machine.torch} ({found})"
        fix = f"install a torch that one is known for: {known}"
        problems.append(Problem(what, fix, machine.deep_gemm is None))
    elif not fits:
        got = ", ".join(f"{pin.split('==')[0]} {v}" for pin, v in machine.pins.items() if v)
        found = f"{machine.deep_gemm or 'none'}{' with ' + got if got else ''}"
        what = f"the grouped GEMMs need the DeepGEMM that fits torch {machine.torch}; found {found}"
        problems.append(Problem(what, command, fits is False))
    if machine.nvcc is None:
        what = "no nvcc: DeepGEMM compiles its kernels at the first call, and the build needs it"
        fix = f"install the CUDA toolkit ({_TOOLKIT}), then export CUDA_HOME=/usr/local/cuda"
        problems.append(Problem(what, fix, False))
    return problems


def _arch_problems(machine: Machine) -> list[Problem]:
    problems = []
    for arch in sorted({device.arch for device in machine.devices}):
        usable = {name: platforms.layouts_of(arch, name) for name in platforms.RECIPES}
        name = platforms.arch_name(arch)
        if not any(usable.values()):
            what = f"no grouped GEMM exists for {name}"
            problems.append(Problem(what, "run the layer on CPU tensors", True))
            continue
        rest = {
            cell.recipe
            for backend in platforms.platform_of(arch).backends
            if backend.rest == "Triton"
            for cell in backend.cells
        }
        if rest and machine.triton is None:
            what = (
                f"{name} runs {' and '.join(sorted(rest))} by kernels of dgmoe_ops, and by Triton,"
                f" which is missing, {TRITON_RUNS}"
            )
            problems.append(Problem(what, "pip install triton", False))
        layouts = {layout for found in usable.values() for layout in found}
        named = [s.value for s in machine.settings if s.name == "DGMOE_LAYOUT"]
        for value in named:
            if value in tuple(Layout) and value not in layouts:
                only = " and ".join(layouts)
                what = f'{name} runs layout {only} only; DGMOE_LAYOUT={value} stops layout="auto"'
                problems.append(Problem(what, "unset DGMOE_LAYOUT", False))
    return problems


def problems(machine: Machine) -> tuple[Problem, ...]:
    """List what is missing, each with the command that mends it."""
    found = []
    if machine.driver and machine.torch_cuda is None:
        what = f"an NVIDIA driver is here, but torch {machine.torch} is a build without CUDA"
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        found.append(Problem(what, fix, False))
    elif machine.driver and not machine.devices:
        what = "an NVIDIA driver is here, but PyTorch sees no device"
        found.append(Problem(what, "check nvidia-smi and CUDA_VISIBLE_DEVICES", False))
    if machine.devices:
        found += _gpu_problems(machine)
        found += _arch_problems(machine)
    found += [
        Problem(setting.error, f"unset {setting.name}", True)
        for setting in machine.settings
        if setting.error
    ]
    return tuple(found)


def backend(machine: Machine, arch: int | str, recipe: str, layout: str) -> str:
    """Who runs a recipe in a layout on an architecture of this machine, or `-` and why nobody
    does."""
    forms = [
        form
        for form in platforms.scale_layouts(arch, recipe)
        if platforms.is_legal(arch, recipe, layout, form)
    ]
    if not forms:
        return f"- ({platforms.arch_name(arch)} does not run it)"
    scales = "" if forms == ["none"] else f", scales {' or '.join(forms)}"
    if arch == "cpu":
        return f"CPU kernel{scales}"
    if "_C_cuda.abi3.so" not in machine.libraries:
        return "- (_C_cuda is not built)"
    name = platforms.backend_of(arch, recipe, layout, forms[0])
    if name == "DeepGEMM" and deep_gemm_fits(machine) is False:
        return "- (DeepGEMM is missing or does not fit)"
    return f"{'CUDA kernel' if name == 'dgmoe_ops' else name}{scales}"


def table(machine: Machine) -> list[dict]:
    """Recipe x layout -> backend, a row for each kind of device here; the CPU is always one."""
    archs = sorted({device.arch for device in machine.devices})
    return [
        {
            "device": platforms.arch_name(arch),
            "recipe": recipe,
            "layout": layout.value,
            "backend": backend(machine, arch, recipe, layout),
        }
        for arch in [*archs, "cpu"]
        for recipe in platforms.RECIPES
        for layout in Layout
    ]


def _runs_its_cells(machine: Machine, arch: int | str) -> bool:
    """Whether an architecture has cells, and this machine what all of them need."""
    found = [
        backend(machine, arch, recipe, layout)
        for recipe in platforms.RECIPES
        for layout in platforms.layouts_of(arch, recipe)
    ]
    return bool(found) and not any(text.startswith("-") for text in found)


def can_run(machine: Machine) -> bool:
    """Whether the layer runs here: on at least one GPU where there are any, else on the CPU.

    A setting without a legal value stops the layer anywhere.
    """
    if any(setting.error for setting in machine.settings):
        return False
    archs = [device.arch for device in machine.devices] or ["cpu"]
    return any(_runs_its_cells(machine, arch) for arch in archs)
