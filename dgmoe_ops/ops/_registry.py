"""What every op of the package gets besides its kernels: a refusal of autograd that names the
argument, and a fake that refuses what the op refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from ._contract import NAMESPACE, check_stand_ins, contract_of

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def refuse_grad(name: str, arg: str) -> None:
    raise RuntimeError(
        f"{NAMESPACE}::{name}: {arg} must not require grad, got requires_grad=True:"
        " dgmoe_ops is for inference; call it under torch.no_grad() or detach the tensor"
    )


def autograd_follows() -> bool:
    """Whether autograd follows any tensor at all in the current mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def wants_grad(tensor: torch.Tensor) -> bool:
    """Whether autograd follows the tensor, backward or forward, in the current mode."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def one_device(name: str, devices: dict[str, torch.device]) -> None:
    """Refuse tensors of several devices; the first argument names the right one."""
    (first, reference), *others = devices.items()
    for arg, device in others:
        if device != reference:
            raise ValueError(
                f"{NAMESPACE}::{name}: {arg} must be on the device of {first}"
                f" ({reference}), got {device}"
            )


def inference_only(overload: torch._ops.OpOverload, calls_ops: bool = False) -> None:
    """Register an autograd kernel that refuses tensors that require grad and otherwise steps aside.

    Without it PyTorch would silently return outputs that do not require grad. Inference mode skips
    it altogether. It stands in Python because the stable ABI can neither ask whether a tensor
    requires grad nor dispatch to the keys below autograd; falling through to the backends, which
    could ask, would let the wrappers of `torch.func` and tensor subclasses pass, whose inner
    tensors require no grad.

    Args:
        overload: the op.
        calls_ops: whether its kernel calls further ops of the package, which then skip theirs.
    """
    schema = overload._schema
    name = schema.name.split("::")[1]
    arg_names = [argument.name for argument in schema.arguments]
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    # Every call with autograd on comes through here: no attribute is looked up twice.
    redispatch = overload._handle.redispatch_boxed
    below_autograd = torch._C._after_autograd_keyset
    grad_enabled, any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad

    def refuse_first(args: tuple, kwargs: dict) -> None:
        for arg, value in [*zip(arg_names, args, strict=False), *kwargs.items()]:
            if isinstance(value, torch.Tensor) and wants_grad(value):
                refuse_grad(name, arg)

    def kernel(keyset, *args, **kwargs):
        forward = forward_ad._current_level >= 0
        if forward or (grad_enabled() and any_requires_grad(*args, **kwargs)):
            refuse_first(args, kwargs)
        return redispatch(keyset & below_autograd, *args, **kwargs)

    def outer_kernel(keyset, *args, **kwargs):
        with torch._C._AutoDispatchBelowAutograd():
            return kernel(keyset, *args, **kwargs)

    def writing_kernel(keyset, *args, **kwargs):
        (outer_kernel if calls_ops else kernel)(keyset, *args, **kwargs)
        # Buffers are keyword-only. Without this a graph that saved one would not see the change.
        for arg in written:
            if kwargs.get(arg) is not None:
                torch.autograd.graph.increment_version(kwargs[arg])

    full = name if not schema.overload_name else f"{name}.{schema.overload_name}"
    chosen = writing_kernel if written else outer_kernel if calls_ops else kernel
    _LIBRARY.impl(full, chosen, "Autograd", with_keyset=True)


def fake_of(name: str, contract: Callable[..., object] | None = None):
    """Decorate the fake kernel of `dgmoe::<name>`, which may name an overload.

    The op becomes inference-only in the same step.

    Args:
        name: of an op, or `<op>.out`.
        contract: checks of an op that Python defines, which get the devices of its tensors by
            argument, and meta tensors and numbers as keywords. None: the op's header contract.
    """
    packet, _, overload = name.partition(".")
    header = contract_of(packet) if contract is None else None

    def register(function):
        op = getattr(getattr(torch.ops, NAMESPACE), packet)
        op = getattr(op, overload or "default")
        arg_names = [argument.name for argument in op._schema.arguments]

        def fake(*args, **kwargs):
            given = dict(zip(arg_names, args, strict=False)) | kwargs
            checks = header
            if contract is not None:
                tensors = {a: v for a, v in given.items() if isinstance(v, torch.Tensor)}
                checks = functools.partial(contract, {a: t.device for a, t in tensors.items()})
            check_stand_ins(checks, given)
            return function(*args, **kwargs)

        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        inference_only(op, calls_ops=contract is not None)
        return function

    return register
