"""Run each CUDA kernel of ours on the edge samples: the program that compute-sanitizer watches.

    compute-sanitizer --tool initcheck python3 -m benchmarks.sanitize

Of the GEMMs only those of the MX recipes, which are ours on SM90: the others are DeepGEMM's there.
Results are compared with the oracles, but of an output only promised positions are read: padding is
deliberately unwritten, and reading it would be a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
import torch

import dgmoe_ops  # noqa: F401  (registers the ops)
from dgmoe_ops import reference
from dgmoe_ops.backends.request import OPS
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.samples import SAMPLES

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _with_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    out = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return out.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the whole storage in one transfer: same strides, gaps included, no kernel involved."""
    return _with_storage(tensor, tensor.untyped_storage().to(device=device))


def promised(have: torch.Tensor, mask: torch.Tensor | None, whole: bool) -> torch.Tensor:
    """Bring an output to the CPU, same strides, reading nothing outside `mask`; zero elsewhere."""
    if whole or have.numel() == 0:
        return _with_storage(have, have.untyped_storage().cpu())
    zeros = torch.UntypedStorage(have.untyped_storage().nbytes()).fill_(0)
    clean = _with_storage(have, zeros)
    bits = _BITS[have.element_size()]
    if mask is None:
        mask = torch.ones(have.shape, dtype=torch.bool)
    mask = mask.cpu().expand(have.shape)
    # Indices, not a device mask: the gather then touches the selected elements alone.
    where = [index.to(have.device) for index in mask.nonzero(as_tuple=True)]
    if where[0].numel():
        clean.view(bits)[mask] = have.view(bits)[tuple(where)].cpu()
    return clean


def run_sample(op: str, args: tuple, kwargs: dict, device: torch.device) -> None:
    """Run one sample on the device and compare what it promises."""
    there = [moved(arg, device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    kwargs_there = {
        key: moved(arg, device) if isinstance(arg, torch.Tensor) else arg
        for key, arg in kwargs.items()
    }
    got = compare.outputs(getattr(torch.ops.dgmoe, op)(*there, **kwargs_there))
    masks = reference.defined(op)(*args, **kwargs)
    whole = op in compare.SLACK
    clean = [promised(have, mask, whole) for have, mask in zip(got, masks, strict=True)]
    # The outputs are back on the CPU; how they were computed they do not tell.
    compare.assert_matches(op, clean, args, kwargs, approximates=device.type == "cuda")


#: sm90_mx_small_m in tiles of 8 and 16 rows, with either width of weights; medium; large
_EXPECTED_ROWS = (1, 8, 40, 100)
#: (experts, rows, hint) of slabs whose samples have every tile height of sm90_mx_medium_m, and
#: 144 rows for sm90_mx_large_m
_SLABS = ((12, 90, 40), (12, 128, 40), (12, 144, 100))
#: (experts, rows) whose segments make medium M, and small M in tiles of 16
_SEGMENTS = ((12, 90), (30, 140), (30, 150))


def mx_calls(op: str) -> list[tuple[tuple, dict]]:
    """MX products that our kernels take on SM90: odd sizes, every kernel and tile."""
    case = {"packed": True, "explicit": True, "alignment": 128, "k": 384, "n": 72}
    masked = op.endswith("masked")
    calls = []
    for seed, recipe in enumerate(("mx", "mixed", "fp4")):

        def build(experts, rows, seed=seed, recipe=recipe):
            sizes = {"m": rows, "experts": experts}
            return SAMPLES[op].build("cpu", seed=seed, recipe=recipe, **sizes, **case)

        for rows in (3, 150, 700):
            args, kwargs = build(5, rows)
            if masked:
                calls += [((*args[:-1], hint), kwargs) for hint in _EXPECTED_ROWS]
            else:
                calls.append((args, kwargs))
        for experts, rows, hint in _SLABS if masked else ():
            args, kwargs = build(experts, rows)
            calls.append(((*args[:-1], hint), kwargs))
        calls += [] if masked else [build(*size) for size in _SEGMENTS]
    return calls


def run_mx(op: str, args: tuple, kwargs: dict, device: torch.device) -> None:
    """Run one MX product on the device and hold it to what its kernel promises."""
    there = [moved(arg, device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    got = getattr(torch.ops.dgmoe, op)(*there, **kwargs)
    (mask,) = reference.defined(op)(*args, **kwargs)
    exact, size = reference.gemm_terms(*args[:5], op=op, **kwargs)
    apart = (promised(got, mask, False).double() - exact).abs()
    allowed = exact.abs() * 2.0**-8 + size * 2.0**-11
    if not ((apart <= allowed) | ~mask.expand(got.shape)).all():
        raise AssertionError("a product is further off than the tensor core explains")


def _runs(ops: tuple[str, ...], mx: bool) -> Iterator[tuple[str, str, list, Callable]]:
    """What to run of each op: its name, what they are, the calls, and who runs one."""
    for op, sample in SAMPLES.items():
        if op not in OPS and op in (ops or SAMPLES):
            yield op, "samples", [sample.tiny("cpu"), *sample.edge("cpu")], run_sample
    for op in OPS[:2] if mx else ():
        if op in (ops or SAMPLES):
            yield op, "MX products", mx_calls(op), run_mx


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--op", "ops", multiple=True, help="exact op name; may be given again; default all")
def main(device: str, ops: tuple[str, ...]) -> None:
    """Run the samples of every op and say how many ran; exits with 1 where one is wrong."""
    where, wrong = torch.device(device), 0
    hopper = where.type == "cpu" or torch.cuda.get_device_capability(where)[0] == 9
    for op, what, calls, run in _runs(ops, hopper):
        for number, (args, kwargs) in enumerate(calls):
            try:
                run(op, args, kwargs, where)
            except AssertionError as error:
                wrong += 1
                click.echo(f"{op} {what} {number}: {error}")
        click.echo(f"{op}: {len(calls)} {what}")
    if where.type == "cuda":
        torch.cuda.synchronize()
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
