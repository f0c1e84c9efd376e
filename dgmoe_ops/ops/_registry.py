"""What every op of the package gets besides its kernels: a refusal of autograd that names the
argument."""

import torch

NAMESPACE = "dgmoe"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def refuse_grad(name: str, arg: str) -> None:
    raise RuntimeError(
        f"{NAMESPACE}::{name}: {arg} must not require grad, got requires_grad=True:"
        " dgmoe_ops is for inference; call it under torch.no_grad() or detach the tensor"
    )


def inference_only(overload: torch._ops.OpOverload) -> None:
    """Register an autograd kernel that refuses tensors that require grad and otherwise steps aside.

    Without it PyTorch would silently return outputs that do not require grad. Inference mode skips
    it altogether.
    """
    schema = overload._schema
    name = schema.name.split("::")[1]
    arg_names = [argument.name for argument in schema.arguments]

    def kernel(keyset, *args, **kwargs):
        if torch.is_grad_enabled():
            named = [*zip(arg_names, args, strict=False), *kwargs.items()]
            for arg, value in named:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    refuse_grad(name, arg)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    full = name if not schema.overload_name else f"{name}.{schema.overload_name}"
    _LIBRARY.impl(full, kernel, "Autograd", with_keyset=True)


def fake_of(name: str):
    """Decorate the fake kernel of `dgmoe::<name>`, which may name an overload.

    The op becomes inference-only in the same step.
    """
    packet, _, overload = name.partition(".")

    def register(function):
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=_LIBRARY)
        op = getattr(getattr(torch.ops, NAMESPACE), packet)
        inference_only(getattr(op, overload or "default"))
        return function

    return register
