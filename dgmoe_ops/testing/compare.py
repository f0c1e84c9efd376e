"""Compare an op's outputs with its oracle's, on the positions that the contract promises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import config, reference
from . import approximate

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: bf16 results that may be so many units in the last place off; all others are bit-equal.
ULPS = {"silu_and_mul": 1, "situ_and_mul": 1, "post_reorder_deepgemm": 1, "ep_gather": 1}
#: ops whose first output the oracle gives in float64, with a bound
BOUNDS = {"topk_gate": reference.topk_gate_bound, "hash_gate": reference.hash_gate_bound}
#: ops that a GPU approximates unless `DGMOE_EXACT_ACTIVATION` is 1
ACTIVATIONS = tuple(
    f"{family}_and_mul{suffix}"
    for family in ("silu", "situ")
    for suffix in ("", "_post_quant_masked", "_post_quant_contig")
)
#: ops that also promise the rows of alignment slack of their scale tensor
SLACK = ("align_scale", "pack_ue8m0")


def run(op: str, args: tuple, kwargs: dict):
    """Call `torch.ops.dgmoe.<op>`."""
    return getattr(torch.ops.dgmoe, op)(*args, **kwargs)


def outputs(result) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as integers, on CPU, contiguous."""
    return tensor.detach().cpu().contiguous().view(_BITS[tensor.element_size()])


def _show(tensor: torch.Tensor, at: tuple[int, ...]) -> str:
    value = tensor.detach().cpu()[at]
    value = value.float() if tensor.is_floating_point() else value
    code = bits(tensor)[at].item() & ((1 << 8 * tensor.element_size()) - 1)
    return f"{value.item()!r} (0x{code:0{2 * tensor.element_size()}x})"


def _fail(label: str, wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor, why: str) -> None:
    at = tuple(wrong.nonzero()[0].tolist())
    raise AssertionError(
        f"{label}: {int(wrong.sum())} of {wrong.numel()} {why}, first at {at}:"
        f" got {_show(got, at)}, expected {_show(want, at)}"
    )


def assert_layout(label: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert the same shape, dtype, device type and strides, also of dimensions of size 1."""
    for name in ("shape", "dtype"):
        if getattr(got, name) != getattr(want, name):
            raise AssertionError(
                f"{label}: {name} {getattr(got, name)}, expected {getattr(want, name)}"
            )
    if got.stride() != want.stride():
        raise AssertionError(f"{label}: strides {got.stride()}, expected {want.stride()}")
    if got.device.type != want.device.type:
        raise AssertionError(f"{label}: device {got.device}, expected {want.device}")


def assert_bits(
    label: str, got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Assert the same bits where `mask` holds (everywhere by default)."""
    wrong = bits(got) != bits(want)
    if mask is not None:
        wrong &= mask.cpu()
    if wrong.any():
        _fail(label, wrong, got, want, "differ in bits")


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Map bf16 to integers so that neighbouring values differ by 1 and both zeros are 0."""
    code = bits(tensor).to(torch.int32)
    magnitude = code & 0x7FFF
    return torch.where(code < 0, -magnitude, magnitude)


def assert_ulps(
    label: str, got: torch.Tensor, want: torch.Tensor, ulps: int, mask: torch.Tensor | None = None
) -> None:
    """Assert bf16 values at most `ulps` apart where `mask` holds; NaN equals NaN."""
    apart = (_ordered(got) - _ordered(want)).abs() > ulps
    got_nan, want_nan = got.isnan().cpu(), want.isnan().cpu()
    wrong = torch.where(got_nan | want_nan, got_nan != want_nan, apart)
    if mask is not None:
        wrong &= mask.cpu()
    if wrong.any():
        _fail(label, wrong, got, want, f"are more than {ulps} bf16 ulp apart")


def assert_bound(
    label: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    bound: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Assert `|got - exact| <= bound` in float64 where `mask` holds; NaN equals NaN."""
    value, exact, bound = got.detach().cpu().double(), exact.cpu(), bound.cpu()
    close = (value - exact).abs() <= bound
    # A result past the largest bf16 rounds to infinity.
    overflow = value.isinf() & (exact.abs() + bound >= 3.3895e38) & (value.sign() == exact.sign())
    wrong = ~torch.where(exact.isnan(), value.isnan(), close | overflow | (value == exact))
    if mask is not None:
        wrong &= mask.cpu()
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {wrong.numel()} are out of bound, first at {at}:"
            f" got {value[at].item()!r}, expected {exact[at].item()!r} +- {bound[at].item():.3g}"
        )


def _is_gemm(op: str) -> bool:
    return "gemm_nt" in op or op == "tf32_hc_prenorm_gemm"


def gemm_bound(
    op: str, got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor
) -> torch.Tensor:
    """Return the error that `dgmoe::<op>` may have: one rounding, and the summation's.

    fp32 sums lose bits of 2^-23 of the sum of magnitudes. Hopper's FP8 tensor cores keep about 13
    bits of a partial sum within a block of 128 columns, before it is scaled and added in fp32. Its
    TF32 cores cut one factor of each product to 10 bits.
    """
    rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-23
    summation = 64 * 2.0**-23
    if got.is_cuda and "f8f8" in op:
        summation = 2.0**-12
    elif got.is_cuda and "tf32" in op:
        summation += 2.0**-10
    return exact.abs() * rounding + magnitude * summation


def alignment_slack(scale: torch.Tensor) -> torch.Tensor:
    """Return the elements between mn and round_up(mn, 4) of every column of an MN-major scale."""
    mn, columns = scale.shape[-2:]
    leading = scale.stride(-1)
    batches = scale.shape[0] if scale.dim() == 3 else 1
    flat = torch.empty(0, dtype=scale.dtype, device=scale.device)
    flat.set_(scale.untyped_storage())
    lines = flat[scale.storage_offset() :][: batches * columns * leading].cpu()
    row = torch.arange(lines.numel()) % max(leading, 1)
    return lines[row >= mn]


def _assert_approximates(op: str, got, wanted, masks, args: tuple, kwargs: dict) -> None:
    for have, want in zip(got, wanted, strict=True):
        assert_layout(op, have, want)
    if len(got) == 1:
        columns = {k: v for k, v in kwargs.items() if k not in ("masked_m", "m_indices")}
        slack = reference.flushed_activation(args[0], **columns)
        approximate.assert_bf16(op, got[0], wanted[0], slack, masks[0])
        return
    rounded = kwargs.get("round_activation", False)
    group_size = kwargs.get("group_size", 128)
    approximate.assert_quantised(op, got, wanted, masks, group_size, rounded)


def assert_matches(
    op: str, got, args: tuple, kwargs: dict, *, approximates: bool | None = None
) -> None:
    """Assert that `got`, the result of `dgmoe::<op>`, is what the oracle promises.

    Layouts are equal; integers, e4m3 bytes and scales are bit-equal; bf16 results keep the op's
    bound (`ULPS`, `gemm_bound`), as do fp32 results of a GEMM and weights (`BOUNDS`), and
    activations that a GPU approximates that of `approximate`. The message names the first wrong
    position and both values.

    Args:
        approximates: whether activations come from the hardware's arithmetic; None asks where
            `got` is.
    """
    wanted = outputs(reference.reference(op)(*args, **kwargs))
    masks = reference.defined(op)(*args, **kwargs)
    got = outputs(got)
    if len(got) != len(wanted):
        raise AssertionError(f"{op}: {len(got)} outputs, expected {len(wanted)}")
    if approximates is None:
        approximates = got[0].is_cuda
    if op in ACTIVATIONS and approximates and not config.exact_activation():
        _assert_approximates(op, got, wanted, masks, args, kwargs)
        return
    terms = reference.gemm_terms(*args, op=op, **kwargs) if _is_gemm(op) else ()
    for index, (have, want, mask) in enumerate(zip(got, wanted, masks, strict=True)):
        label = f"{op}[{index}]" if len(got) > 1 else op
        assert_layout(label, have, want)
        if terms:
            exact, magnitude = terms[2 * index : 2 * index + 2]
            assert_bound(label, have, exact, gemm_bound(op, have, exact, magnitude), mask)
        elif op in BOUNDS and index == 0:
            assert_bound(label, have, *BOUNDS[op](*args, **kwargs), mask)
        elif op in ULPS:
            assert_ulps(label, have, want, ULPS[op], mask)
        else:
            assert_bits(label, have, want, mask)
        if op in SLACK:
            have_slack, want_slack = alignment_slack(have), alignment_slack(want)
            if have_slack.shape != want_slack.shape:
                raise AssertionError(f"{label}: the storage ends before its alignment slack")
            assert_bits(f"{label} slack", have_slack, want_slack)


def check(op: str, args: tuple, kwargs: dict, call: Callable | None = None) -> None:
    """Run the op (or `call`) on these arguments and assert that it matches its oracle."""
    got = (call or getattr(torch.ops.dgmoe, op))(*args, **kwargs)
    assert_matches(op, got, args, kwargs)
