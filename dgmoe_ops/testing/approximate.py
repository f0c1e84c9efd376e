"""How far activations on a GPU may stand from their oracle when the hardware approximates them."""

from __future__ import annotations

import torch

from ..reference.scale import dequantized_scale

ONE_IN = 10_000  #: e4m3 values, or groups, of which one may be off
SCALE_TOLERANCE = 2e-6  #: of an fp32 scale, relatively


def ordered_e4m3(q: torch.Tensor) -> torch.Tensor:
    """Map e4m3 to integers so that neighbouring values differ by 1 and both zeros are 0."""
    code = q.detach().cpu().contiguous().view(torch.uint8).to(torch.int32)
    magnitude = code & 0x7F
    return torch.where(code >= 0x80, -magnitude, magnitude)


def _few(count: int, total: int, one_in: int) -> bool:
    """Whether so many are few; one always is, of however small a total."""
    return count <= 1 + total // one_in


def moved_groups(
    label: str,
    got: torch.Tensor,
    want: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
    rounded: bool,
) -> torch.Tensor:
    """Return which groups (.., groups) have another scale; assert that they are few.

    A power-of-two scale moves by a factor of two where the largest value of the group stands at a
    boundary, one of values that were rounded to bf16 by their unit in the last place. NaN stays
    NaN, and padding bytes zero.
    """
    mask = mask.cpu().all(-1, keepdim=True)
    have, need = (dequantized_scale(t.detach().cpu(), groups) for t in (got, want))
    if (mask & (have.isnan() != need.isnan())).any():
        raise AssertionError(f"{label}: a scale is NaN on one side only")
    off = mask & ~need.isnan() & ((have - need).abs() > SCALE_TOLERANCE * need.abs())
    if (off & ((have > 2 * need) | (need > 2 * have))).any():
        raise AssertionError(f"{label}: a scale is off by more than a factor of two")
    one_in = ONE_IN // 10 if rounded else ONE_IN
    if not _few(int(off.sum()), off.numel(), one_in):
        raise AssertionError(f"{label}: {int(off.sum())} of {off.numel()} scales are off")
    return off


def assert_quantised(
    label: str,
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    masks: tuple[torch.Tensor, torch.Tensor],
    group_size: int = 128,
    rounded: bool = False,
) -> None:
    """Assert that (q, scale) is the oracle's but for one value and one group in `ONE_IN`.

    Values whose group has another scale are not compared; all others are at most one step apart.
    """
    columns = want[0].shape[-1]
    groups = -(-columns // group_size)
    moved = moved_groups(f"{label}[1]", got[1], want[1], masks[1], groups, rounded)
    compared = masks[0].cpu() & ~moved.repeat_interleave(group_size, -1)[..., :columns]
    apart = (ordered_e4m3(got[0]) - ordered_e4m3(want[0])).abs() * compared
    if (apart > 1).any():
        at = tuple((apart > 1).nonzero()[0].tolist())
        raise AssertionError(f"{label}[0]: values more than one step apart, first at {at}")
    if not _few(int(apart.sum()), apart.numel(), ONE_IN):
        raise AssertionError(f"{label}[0]: {int(apart.sum())} of {apart.numel()} values are off")


def assert_bf16(
    label: str, got: torch.Tensor, want: torch.Tensor, slack: torch.Tensor, mask: torch.Tensor
) -> None:
    """Assert bf16 values at most one unit in the last place, or `slack`, apart.

    A value that is not finite is finite on neither side.
    """
    have, need = got.detach().cpu().double(), want.cpu().double()
    finite = have.isfinite() & need.isfinite()
    close = (have - need).abs() <= need.abs() * 2.0**-7 + slack.cpu() + 2.0**-133
    both_broken = ~have.isfinite() & ~need.isfinite()
    wrong = mask.cpu() & ~both_broken & ~(finite & close)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{label}: first at {at}: got {have[at]}, expected {need[at]}")
