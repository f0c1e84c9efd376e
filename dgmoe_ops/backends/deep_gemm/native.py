"""Direct calls: releases that bind through apache-tvm-ffi export C functions, which our C++ calls
without the way through Python.

How a release's wrapper calls its library is recorded, not known: the wrapper runs once with
stand-ins for its arguments and for the library. What is recorded becomes the list of arguments that
`csrc/gemm/deep_gemm/deep_gemm.cu` fills in. Every other release is called through Python.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import torch

from ... import config
from ..request import OPS, Operands, Request
from .rules import rule_of
from .versions import binding, version

#: The C functions are `__tvm_ffi_<name>`, of tvm-ffi's safe call type.
_PREFIX = "__tvm_ffi_"
_NO_SCALES = -1  # instead of a ScaleLayout
_bound: set[str] = set()  # ops that are bound, or that cannot be


class Argument(IntEnum):
    """One argument of the C function, as the C++ side numbers it too."""

    A = 0
    A_SCALE = 1
    B = 2
    B_SCALE = 3
    D = 4
    INFO = 5
    EXPECTED_M = 6
    SQR_SUM = 7
    NUM_SPLITS = 8
    NONE = 9
    FALSE = 10
    TRUE = 11
    EMPTY_TEXT = 12
    NK_TEXT = 13


class _StandIn:
    """A stand-in for one argument."""

    def __init__(self, argument: Argument) -> None:
        self.argument = argument


_STAND_INS = {argument: _StandIn(argument) for argument in list(Argument)[:9]}
_CONSTANTS = {
    "None": Argument.NONE,
    "False": Argument.FALSE,
    "True": Argument.TRUE,
    "''": Argument.EMPTY_TEXT,
    "'nk'": Argument.NK_TEXT,
}


class _Recorder:
    """A stand-in for the library that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple]] = []

    def __getattr__(self, name: str) -> Callable:
        return lambda *args: self.calls.append((name, args))


def record(function: Callable, args: tuple, kwargs: dict) -> tuple[str, list[Argument]] | None:
    """Record how a release's Python function calls its library.

    Returns the library function's name and its arguments; None where the function is not of that
    kind, or passes something on that is not known here.
    """
    if not isinstance(function, types.FunctionType) or "_C" not in function.__globals__:
        return None
    recorder = _Recorder()
    double = types.FunctionType(
        function.__code__,
        {**function.__globals__, "_C": recorder},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    double.__kwdefaults__ = function.__kwdefaults__
    try:
        double(*args, **kwargs)
    except Exception:
        return None
    if len(recorder.calls) != 1:
        return None
    [(name, passed)] = recorder.calls
    arguments = [
        value.argument if isinstance(value, _StandIn) else _CONSTANTS.get(repr(value))
        for value in passed
    ]
    return None if None in arguments else (name, arguments)


def stand_ins(request: Request) -> Request:
    """The request with a stand-in for everything that changes from call to call."""
    scaled = request.operands.a_scale is not None
    operands = Operands(
        a=_STAND_INS[Argument.A],
        a_scale=_STAND_INS[Argument.A_SCALE] if scaled else None,
        b=_STAND_INS[Argument.B],
        b_scale=_STAND_INS[Argument.B_SCALE] if scaled else None,
        info=_STAND_INS[Argument.INFO],
        d=_STAND_INS[Argument.D],
        sqr_sum=_STAND_INS[Argument.SQR_SUM],
    )
    return request.with_spec(expected_m=_STAND_INS[Argument.EXPECTED_M])._replace(
        operands=operands, num_splits=_STAND_INS[Argument.NUM_SPLITS]
    )


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def bind(module: types.ModuleType, function: Callable, request: Request, arch_major: int) -> bool:
    """Hand the library's C function for an op to the C++ side, once; tell whether it took it.

    Called after the first call through Python returned.
    """
    if request.op in _bound:
        return False
    _bound.add(request.op)
    if not config.native_calls() or binding(version()) != "tvm-ffi":
        return False
    from .library import arguments

    args, kwargs = arguments(stand_ins(request))
    recorded = record(function, args, kwargs)
    if recorded is None:
        return False
    name, codes = recorded
    try:
        own = ctypes.CDLL(str(Path(module.__file__).parent / "_C.so"))
        process = ctypes.CDLL(None)
        target = _address(own, _PREFIX + name)
        take_error = _address(process, "TVMFFIErrorMoveFromRaised")
        release = _address(process, "TVMFFIObjectDecRef")
    except (OSError, AttributeError):
        return False
    rule = rule_of(arch_major)
    scaled = request.operands.a_scale is not None
    torch.ops.dgmoe._deep_gemm_bind(
        OPS.index(request.op),
        target,
        take_error,
        release,
        [int(code) for code in codes],
        int(rule.a_scale) if scaled else _NO_SCALES,
        int(rule.b_scale) if scaled else _NO_SCALES,
    )
    return True
