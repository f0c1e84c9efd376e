"""What every op of the package gets besides its kernels: a refusal of autograd that names the
argument."""

import torch
from torch.autograd import forward_ad

NAMESPACE = "dgmoe"
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


def one_device(name: str, arg_names: list[str], args: tuple, kwargs: dict) -> None:
    """Refuse tensors of several devices: PyTorch calls a fake where one of them is on meta."""
    named = [*zip(arg_names, args, strict=False), *kwargs.items()]
    tensors = [(arg, value) for arg, value in named if isinstance(value, torch.Tensor)]
    first, reference = tensors[0]
    for arg, value in tensors[1:]:
        if value.device != reference.device:
            raise ValueError(
                f"{NAMESPACE}::{name}: {arg} must be on the device of {first}"
                f" ({reference.device}), got {value.device}"
            )


def inference_only(overload: torch._ops.OpOverload) -> None:
    """Register an autograd kernel that refuses tensors that require grad and otherwise steps aside.

    Without it PyTorch would silently return outputs that do not require grad. Inference mode skips
    it altogether.
    """
    schema = overload._schema
    name = schema.name.split("::")[1]
    arg_names = [argument.name for argument in schema.arguments]
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]

    def kernel(keyset, *args, **kwargs):
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            named = [*zip(arg_names, args, strict=False), *kwargs.items()]
            for arg, value in named:
                if isinstance(value, torch.Tensor) and wants_grad(value):
                    refuse_grad(name, arg)
        with torch._C._AutoDispatchBelowAutograd():
            out = overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        # Buffers are keyword-only. Without this a graph that saved one would not see the change.
        for arg in written:
            if kwargs.get(arg) is not None:
                torch.autograd.graph.increment_version(kwargs[arg])
        return out

    full = name if not schema.overload_name else f"{name}.{schema.overload_name}"
    _LIBRARY.impl(full, kernel, "Autograd", with_keyset=True)


def fake_of(name: str):
    """Decorate the fake kernel of `dgmoe::<name>`, which may name an overload.

    The op becomes inference-only in the same step.
    """
    packet, _, overload = name.partition(".")

    def register(function):
        op = getattr(getattr(torch.ops, NAMESPACE), packet)
        op = getattr(op, overload or "default")
        arg_names = [argument.name for argument in op._schema.arguments]

        def fake(*args, **kwargs):
            one_device(packet, arg_names, args, kwargs)
            return function(*args, **kwargs)

        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        inference_only(op)
        return function

    return register
