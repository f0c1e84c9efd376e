"""Calls that differ from a legal one in a single argument, most of which an op must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .samples import with_strides

Named = dict[str, object]
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)
_INTS = (-1, 0, 1, 3, 7, 64, 2**40)  # in between, a legal one may ask for gigabytes
_FLOATS = (0.0, -1.0, 1.5, 1e-39, 1e39, float("inf"), float("nan"))
_INT_LISTS = ([], [1], [0, 0], [1, 32], [1, 64], [1, 128], [128, 128], [-1, 128], [1, 128, 1])


def _resized(tensor: torch.Tensor, dim: int, by: int) -> torch.Tensor:
    """A tensor of which one dimension is longer or shorter; the values of the rest stay."""
    sizes = list(tensor.shape)
    sizes[dim] += by
    other = torch.zeros(sizes, dtype=tensor.dtype, device=tensor.device)
    common = tuple(slice(min(a, b)) for a, b in zip(sizes, tensor.shape, strict=True))
    other[common] = tensor[common]
    return other


def tensor_mutations(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in _DTYPES:
        if dtype != tensor.dtype:
            other = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
            yield f"as {dtype}", other
    yield "an extra dimension", tensor.unsqueeze(0)
    if tensor.dim() and tensor.shape[0]:
        yield "a dimension less", tensor[0]
    for dim, size in enumerate(tensor.shape):
        yield f"dimension {dim} one longer", _resized(tensor, dim, 1)
        if size:
            yield f"dimension {dim} one shorter", _resized(tensor, dim, -1)
    if tensor.dim() >= 2:
        for strides in ("transposed", "sliced", "stepped"):
            yield strides, with_strides(tensor, strides)
    elif tensor.dim() == 1:
        yield "every second element", torch.stack([tensor, tensor], -1)[:, 0]
    yield "on meta", tensor.to("meta")


def mutations(
    schema: torch._C.FunctionSchema, named: Named, strings: tuple[str, ...] = ("nonsense", "")
) -> Iterator[tuple[str, Named]]:
    """What is changed, and the arguments by name. The given call is legal, and stays unchanged."""
    device = next(v for v in named.values() if isinstance(v, torch.Tensor)).device
    for argument in schema.arguments:
        arg, kind = argument.name, str(argument.type)
        given = named.get(arg, argument.default_value if argument.has_default_value() else None)
        others: list[tuple[str, object]] = []
        if kind.startswith("Optional"):
            others.append(("None", None))
        if isinstance(given, torch.Tensor):
            others += tensor_mutations(given)
        elif "Tensor" in kind:
            for shape in ((), (3,), (2, 4)):
                others.append((f"a tensor {shape}", torch.zeros(shape, device=device)))
        elif "List[int]" in kind:
            others += [(str(value), value) for value in _INT_LISTS]
        elif "int" in kind.lower():
            near = (given - 1, given + 1) if isinstance(given, int) else ()
            others += [(str(value), value) for value in (*near, *_INTS)]
        elif "float" in kind:
            others += [(str(value), value) for value in _FLOATS]
        elif "bool" in kind:
            others.append((str(not given), not given))
        elif "str" in kind:
            others += [(repr(value), value) for value in strings]
        for what, value in others:
            yield f"{arg} {what}", named | {arg: value}
