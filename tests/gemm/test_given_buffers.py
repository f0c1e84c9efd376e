"""The `.out` overload of every GEMM: written in place, and refused where it does not fit."""

import pytest
import torch
from helpers import ROOM_OPS, beside, misaligned, refused, same_bits, samples, strided

import dgmoe_ops
from dgmoe_ops import reference
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.samples import SAMPLES

TF32 = "tf32_hc_prenorm_gemm"
each_gemm = pytest.mark.parametrize("name", ROOM_OPS["gemm"])


def packet(name: str):
    return getattr(torch.ops.dgmoe, name)


def buffer_names(name: str) -> tuple[str, ...]:
    return ("out", "sqr_sum") if name == TF32 else ("out",)


def buffers(name: str, results) -> dict[str, torch.Tensor]:
    """NaN-filled tensors like the results."""
    filled = [torch.full_like(result, float("nan")) for result in results]
    return dict(zip(buffer_names(name), filled, strict=True))


def tiny(name: str, device) -> tuple[dict, tuple[torch.Tensor, ...]]:
    """A small call with its arguments by name, and its results."""
    args, kwargs = SAMPLES[name].tiny(device)
    names = [argument.name for argument in packet(name).default._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    return named, compare.outputs(packet(name)(**named))


@each_gemm
def test_same_bits_as_without(name, device) -> None:
    for args, kwargs in samples(name, device):
        wanted = compare.outputs(packet(name)(*args, **kwargs))
        given = buffers(name, wanted)
        assert packet(name).out(*args, **kwargs, **given) is None
        masks = reference.defined(name)(*args, **kwargs)
        for got, want, mask in zip(given.values(), wanted, masks, strict=True):
            compare.assert_bits(name, got, want, mask)


@each_gemm
def test_wrapper_returns_the_buffer(name, device) -> None:
    named, wanted = tiny(name, device)
    given = buffers(name, wanted)
    got = compare.outputs(getattr(dgmoe_ops.ops, name)(**named, **given))
    assert all(one is other for one, other in zip(got, given.values(), strict=True))
    fresh = compare.outputs(getattr(dgmoe_ops.ops, name)(**named))
    masks = reference.defined(name)(**named)
    for one, other, mask in zip(got, fresh, masks, strict=True):
        compare.assert_bits(name, one, other, mask)


@each_gemm
def test_shared_memory_is_refused(name, device) -> None:
    named, wanted = tiny(name, device)
    tensors = [arg for arg, value in named.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 1
    for arg in tensors:
        for buffer in buffer_names(name):
            given = buffers(name, wanted)
            view, given[buffer] = beside(named[arg], given[buffer], shared=1)
            with refused(name, buffer):
                packet(name).out(**(named | {arg: view}), **given)
            if device.type == "cuda" and arg.endswith("_scale"):
                continue  # the view is row-major, which the library does not take
            view, given[buffer] = beside(named[arg], given[buffer], shared=0)
            packet(name).out(**(named | {arg: view}), **given)


def test_two_buffers_are_two(device) -> None:
    named, wanted = tiny(TF32, device)
    out, sqr_sum = buffers(TF32, wanted).values()
    with refused(TF32, "sqr_sum"):
        packet(TF32).out(**named, out=out, sqr_sum=out.view(-1)[: sqr_sum.numel()])
    for alone in ({"out": out}, {"sqr_sum": sqr_sum}):
        with refused(TF32, "out"):
            dgmoe_ops.ops.tf32_hc_prenorm_gemm(**named, **alone)


@each_gemm
def test_bad_buffers(name, device) -> None:
    named, wanted = tiny(name, device)
    for buffer in buffer_names(name):
        good = buffers(name, wanted)
        fit = good[buffer]
        for bad in (
            fit.half(),
            fit.unsqueeze(0),
            fit.new_empty((fit.shape[0] + 1, *fit.shape[1:])),
            fit.new_empty((*fit.shape[:-1], fit.shape[-1] + 1)),
            strided(fit),
            misaligned(fit),
        ):
            with refused(name, buffer):
                packet(name).out(**named, **(good | {buffer: bad}))
        if device.type != "cpu":
            with refused(name, buffer):
                packet(name).out(**named, **(good | {buffer: fit.cpu()}))


@each_gemm
def test_compiles_whole(name, device) -> None:
    named, wanted = tiny(name, device)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def call(named, given):
        packet(name).out(**named, **given)
        return tuple(buffer + 0 for buffer in given.values())

    given = buffers(name, wanted)
    masks = reference.defined(name)(**named)
    for got, kept, want, mask in zip(
        call(named, given), given.values(), wanted, masks, strict=True
    ):
        compare.assert_bits(name, kept, want, mask)
        compare.assert_bits(name, got, want + 0, mask)


@each_gemm
def test_a_graph_sees_the_write(name, device) -> None:
    named, wanted = tiny(name, device)
    given = buffers(name, wanted)
    before = {buffer: tensor._version for buffer, tensor in given.items()}
    packet(name).out(**named, **given)
    assert all(tensor._version > before[buffer] for buffer, tensor in given.items())
    given["out"].requires_grad_()
    with pytest.raises(RuntimeError, match=f"dgmoe::{name}: out must not require grad"):
        packet(name).out(**named, **given)


@pytest.mark.parametrize("name", ["gemm_nt_bf16bf16f32", "grouped_gemm_nt_bf16_masked", TF32])
def test_opcheck(name, device) -> None:
    named, wanted = tiny(name, device)
    utils = ["test_schema", "test_faketensor"]
    # The undefined rows must compare equal between two runs.
    given = {key: torch.zeros_like(value) for key, value in buffers(name, wanted).items()}
    torch.library.opcheck(packet(name).out, (), named | given, test_utils=utils)


def test_undefined_rows_stay_as_they_were(device) -> None:
    """What is undefined the CPU does not touch."""
    if device.type == "cuda":
        pytest.skip("a GPU's tiles may store whole")
    for name in ("grouped_gemm_nt_f8f8bf16_masked", "grouped_gemm_nt_bf16_contig"):
        named, wanted = tiny(name, device)
        out = torch.full_like(wanted[0], 7.0)
        packet(name).out(**named, out=out)
        (mask,) = reference.defined(name)(**named)
        assert (~mask).any() and same_bits(out[~mask], torch.full_like(out[~mask], 7.0))
