"""DeepGEMM behind the GEMM ops on CUDA: found at the first call, then given our buffers.

Its wheels are each built for one torch and say so nowhere in their metadata, so a wheel that does
not fit is the most common trouble: every failure of that kind becomes one sentence that names the
wheel that does.

A call of a shape that has not run yet comes here by `backends.entry`; where the release allows it,
later ones go from C++ to the library at once.
"""

from __future__ import annotations

import torch

from ... import _sanity, config
from .. import sanity, scopes
from ..request import Request
from . import library, native, rules
from .overlap import down_gemm_overlap
from .versions import WHEELS, fitting_wheel, misfit_message, version

__all__ = [
    "WHEELS",
    "describe",
    "down_gemm_overlap",
    "fitting_wheel",
    "misfit_message",
    "prove_fit",
    "run",
    "version",
]


def run(request: Request) -> None:
    """Check what the library would not, and run one GEMM by it.

    Raises:
        ValueError: a size, scale layout, granularity or alignment that does not run there.
        RuntimeError: no library that fits, or an overlap that nobody would signal.
    """
    arch_major = library.arch_major(request.operands.a.get_device())
    rule = rules.rule_of(arch_major)
    if rule is not None:
        scopes.check(request, rule.name, rule.alignments, request.op == scopes.OVERLAP_OP)
    alignment = scopes.alignment_of(request)
    rules.check_sizes(request, alignment)
    request, recipes = rules.check_scales(request, arch_major)
    if config.sanity_check() and _sanity.looks_at(request.operands.a):
        exponents = rule is not None and rule.powers_of_two
        sanity.check_request(request, exponents, alignment)
    module, function = library.call(request, recipes)
    if not recipes and not scopes.overlap_active():
        native.bind(module, function, request, arch_major)


def prove_fit(device: torch.device | str) -> None:
    """Import the library and check one small product on a GPU, once a process.

    Raises:
        RuntimeError: there is none, or it does not fit this torch; the message says which does.
    """
    library.proven(torch.device(device))


def describe(device: torch.device | str) -> str:
    """Say which backend runs a grouped GEMM on `device`, for people to read."""
    device = torch.device(device)
    if device.type == "cpu":
        return "dgmoe_ops CPU kernel"
    if device.type != "cuda":
        return f"no backend for {device.type}"
    return f"DeepGEMM ({version() or 'not installed'})"
