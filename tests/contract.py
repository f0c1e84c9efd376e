"""What an op of the package consists of, and which of it a given op lacks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
from torch._library.simple_registry import singleton as registry

import dgmoe_ops
from dgmoe_ops import reference
from dgmoe_ops.testing.samples import SAMPLES
from docs.scripts.reference import ops_index

ROOT = Path(__file__).parent.parent
NAMESPACE = "dgmoe"
#: ops that Python registers: no C++ contract, and the layer's own tests make their samples
PYTHON_ROOMS = {"fused_moe": "layer"}


def registered_ops() -> list[str]:
    """The names of all public ops, without overloads."""
    prefix = NAMESPACE + "::"
    names = {
        name.removeprefix(prefix).split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix)
    }
    return sorted(name for name in names if not name.startswith("_"))


def room_of(op: str) -> str | None:
    if op in PYTHON_ROOMS:
        return PYTHON_ROOMS[op]
    headers = sorted((ROOT / "csrc").glob(f"*/{op}.h"))
    return headers[0].parent.name if headers else None


def schemas(op: str) -> list[torch._C.FunctionSchema]:
    packet = getattr(torch.ops.dgmoe, op)
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


def has_kernel(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{op}", key)


def has_checks(op: str) -> bool:
    """Whether C++ binds the header contract for fakes, as the private op `_check_<op>`."""
    checks = f"_check_{op}"
    known = f"{NAMESPACE}::{checks}" in torch._C._dispatch_get_all_op_names()
    return known and has_kernel(checks, "Meta")


def has_fake(op: str) -> bool:
    entry = registry.find(f"{NAMESPACE}::{op}")
    return entry.fake_impl.kernel is not None or has_kernel(op, "Meta")


def has_cuda(op: str, room: str | None) -> bool:
    """A .cu file with a registration, or a kernel that a Python backend registers."""
    if has_kernel(op, "CUDA") or has_kernel(op, "CompositeExplicitAutograd"):
        return True
    source = ROOT / "csrc" / str(room) / f"{op}.cu"
    if source.exists():
        return re.search(rf'IMPL\(dgmoe, CUDA, m\).*"{op}"', source.read_text(), re.S) is not None
    if room != "gemm":
        return False
    backends = (ROOT / "dgmoe_ops" / "backends").glob("*.py")
    return any(mentions(path, rf"\b{op}\b") for path in backends)


def same_signature(function, schema: torch._C.FunctionSchema) -> bool:
    """Whether a function takes a schema's arguments: names, order, kind, the schema's defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    if [p.name for p in parameters] != [a.name for a in schema.arguments]:
        return False
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        if keyword_only != argument.kwarg_only:
            return False
        if argument.has_default_value() and parameter.default != argument.default_value:
            return False
    return True


def has_contract(op: str, room: str | None) -> bool:
    header = ROOT / "csrc" / str(room) / f"{op}.h"
    return header.exists() and header.read_text().startswith(f"// {op}: ")


def is_documented(op: str) -> bool:
    wrapper = getattr(dgmoe_ops.ops, op, None) or getattr(dgmoe_ops, op, None)
    return bool(wrapper and wrapper.__doc__)


def wrapper_matches(op: str) -> bool:
    """Layer wrappers may take more; the others mirror their schema, or that of their `.out`."""
    if op in PYTHON_ROOMS:
        return True
    wrapper = getattr(dgmoe_ops.ops, op, None)
    return wrapper is not None and any(same_signature(wrapper, one) for one in schemas(op))


def overloads_are_whole(op: str) -> bool:
    """Whether every overload has what the plain op has: a CPU kernel, and the autograd refusal."""
    return all(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"dgmoe::{op}.{one.overload_name}", key)
        for one in schemas(op)
        if one.overload_name
        for key in ("CPU", "Autograd")
    )


def mentions(path: Path, pattern: str) -> bool:
    return path.exists() and re.search(pattern, path.read_text(), re.M) is not None


def has_benchmark(op: str, room: str | None) -> bool:
    # The layer stands in its benchmark as one contender among others, in a file of its own.
    names = "*layer*.py" if op in PYTHON_ROOMS else f"bench_{room}.py"
    return any(mentions(path, rf"\b{op}\b") for path in (ROOT / "benchmarks").glob(names))


def missing_parts(op: str) -> list[str]:
    """Name what `dgmoe::<op>` lacks; empty where it is whole."""
    room = room_of(op)
    python = op in PYTHON_ROOMS
    oracle = getattr(reference, f"{op}_ref", None)
    default = schemas(op)[0]
    present = {
        "room": room is not None,
        "contract header": python or has_contract(op, room),
        "checks for fakes": python or has_checks(op),
        "CPU kernel": has_kernel(op, "CPU") or has_kernel(op, "CompositeExplicitAutograd"),
        "CUDA kernel": has_cuda(op, room),
        "fake kernel": has_fake(op),
        "autograd refusal": has_kernel(op, "Autograd"),
        "overloads": overloads_are_whole(op),
        "oracle": oracle is not None,
        "oracle signature": oracle is not None and (python or same_signature(oracle, default)),
        "sample": python or op in SAMPLES,
        "wrapper with docstring": is_documented(op),
        "wrapper signature": wrapper_matches(op),
        "test file": (ROOT / "tests" / str(room) / f"test_{op}.py").exists(),
        "benchmark": has_benchmark(op, room),
        "reference row": f"| [`{op}`]" in ops_index(),
    }
    return [part for part, there in present.items() if not there]
