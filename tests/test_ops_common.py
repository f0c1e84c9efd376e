"""What holds for every op alike; the file of an op in its room holds what is special about it."""

from __future__ import annotations

import pytest
import torch
from helpers import OPS, op, samples

from dgmoe_ops import reference
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.samples import SAMPLES

each_op = pytest.mark.parametrize("name", OPS)


def arg_names(name: str) -> list[str]:
    return [argument.name for argument in op(name)._schema.arguments]


def tensors_of(name: str, args: tuple, kwargs: dict) -> dict[str, torch.Tensor]:
    named = dict(zip(arg_names(name), args, strict=False)) | kwargs
    return {arg: value for arg, value in named.items() if isinstance(value, torch.Tensor)}


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, also those between its elements."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage()).clone()


@each_op
def test_samples_match_the_oracle(name: str, device: torch.device) -> None:
    for args, kwargs in samples(name, device):
        compare.check(name, args, kwargs)


@each_op
def test_inputs_stay_as_they_are(name: str, device: torch.device) -> None:
    for args, kwargs in samples(name, device):
        given = tensors_of(name, args, kwargs)
        before = {arg: memory(tensor) for arg, tensor in given.items()}
        outputs = compare.outputs(op(name)(*args, **kwargs))
        storages = [output.untyped_storage().data_ptr() for output in outputs if output.numel()]
        assert len(set(storages)) == len(storages), "two outputs share memory"
        for arg, tensor in given.items():
            assert torch.equal(memory(tensor), before[arg]), f"{name} wrote to {arg}"
            if tensor.numel():
                shares = tensor.untyped_storage().data_ptr() in storages
                assert not shares, f"{name} returned {arg}"


@each_op
def test_every_run_gives_the_same_bits(name: str, device: torch.device) -> None:
    for args, kwargs in samples(name, device):
        first = compare.outputs(op(name)(*args, **kwargs))
        masks = reference.defined(name)(*args, **kwargs)
        for _ in range(2):
            again = compare.outputs(op(name)(*args, **kwargs))
            for one, other, mask in zip(first, again, masks, strict=True):
                compare.assert_bits(name, other, one, mask)


@each_op
def test_threads_do_not_change_the_bits(name: str, device: torch.device) -> None:
    args, kwargs = SAMPLES[name].edge(device)[-1]
    masks = reference.defined(name)(*args, **kwargs)
    first = compare.outputs(op(name)(*args, **kwargs))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        again = compare.outputs(op(name)(*args, **kwargs))
    finally:
        torch.set_num_threads(threads)
    for one, other, mask in zip(first, again, masks, strict=True):
        compare.assert_bits(name, other, one, mask)


@each_op
def test_grad_is_refused_by_name(name: str, device: torch.device) -> None:
    args, kwargs = SAMPLES[name].tiny(device)
    floating = [
        arg for arg, t in tensors_of(name, args, kwargs).items() if t.dtype.is_floating_point
    ]
    for arg in floating:
        named = dict(zip(arg_names(name), args, strict=False)) | kwargs
        named[arg] = named[arg].detach().clone().requires_grad_()
        message = rf"dgmoe::{name}: {arg} must not require grad.*inference"
        with pytest.raises(RuntimeError, match=message):
            op(name)(**named)
        with torch.no_grad():
            op(name)(**named)
        with torch.inference_mode():
            op(name)(**named)


@each_op
def test_compiles_whole_with_dynamic_sizes(name: str, device: torch.device) -> None:
    """One graph, no breaks, and the oracle's numbers."""
    args, kwargs = SAMPLES[name].tiny(device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a, **k: op(name)(*a, **k), backend="aot_eager", fullgraph=True, dynamic=True
    )
    compare.assert_matches(name, compiled(*args, **kwargs), args, kwargs)


@each_op
def test_wrong_devices_are_refused(name: str, device: torch.device) -> None:
    """An argument that was left on the CPU is named, not dereferenced."""
    args, kwargs = SAMPLES[name].tiny(device)
    given = tensors_of(name, args, kwargs)
    if len(given) < 2 or device.type == "cpu":
        pytest.skip("needs two devices")
    for arg in list(given)[1:]:
        named = dict(zip(arg_names(name), args, strict=False)) | kwargs
        named[arg] = named[arg].cpu()
        with pytest.raises(ValueError, match=rf"dgmoe::{name}: \w+ must be on the device of"):
            op(name)(**named)
