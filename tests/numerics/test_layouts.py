"""Index arithmetic: layout.h and layouts.py say the same, and their bounds are reached."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dgmoe_ops import layouts

CONTIG_TABLE = [
    (5, 32, 128, 640),
    (32, 32, 32, 1024),
    (3072, 32, 128, 7040),
    (512, 1, 128, 512),
    (513, 1, 128, 640),
    (32768, 32, 128, 36736),
    (24, 256, 32, 768),
    (6, 4, 4, 16),
    (0, 4, 128, 0),
    (6, 0, 128, 0),
]


@pytest.mark.parametrize(("assignments", "experts", "alignment", "rows"), CONTIG_TABLE)
def test_contig_rows_worked(numerics, assignments, experts, alignment, rows) -> None:
    assert numerics.contig_rows(assignments, experts, alignment) == rows
    assert layouts.contig_rows(assignments, experts, alignment) == rows


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(1, 64).map(lambda n: 4 * n))
def test_contig_rows_agree(numerics, assignments: int, experts: int, alignment: int) -> None:
    expected = layouts.contig_rows(assignments, experts, alignment)
    assert numerics.contig_rows(assignments, experts, alignment) == expected


@pytest.mark.parametrize("assignments", range(8))
@pytest.mark.parametrize("experts", range(1, 5))
def test_contig_rows_is_the_least_bound(numerics, assignments: int, experts: int) -> None:
    """Over every way to spread the assignments, padded segments reach the bound, never more."""
    alignment = 4
    most = max(
        sum(layouts.round_up(count, alignment) for count in counts)
        for counts in itertools.product(range(assignments + 1), repeat=experts)
        if sum(counts) <= assignments
    )
    assert numerics.contig_rows(assignments, experts, alignment) == most


@given(st.integers(0, 2**40))
@example(0)
@example(1)
@example(255)
@example(256)
@example(257)
def test_slab_and_tma_rows_agree(numerics, count: int) -> None:
    slab, aligned = numerics.slab_rows(count), numerics.tma_aligned(count)
    assert slab == layouts.slab_rows(count)
    assert slab % 256 == 0 and count <= slab < count + 256
    assert aligned == layouts.round_up(count, layouts.TMA_ELEMENTS)
    assert aligned % 4 == 0 and count <= aligned < count + 4


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_divisions_agree(numerics, a: int, b: int) -> None:
    assert numerics.ceil_div(a, b) == layouts.ceil_div(a, b) == -(-a // b)
    assert numerics.round_up(a, b) == layouts.round_up(a, b)


@given(
    form=st.sampled_from(list(layouts.ScaleLayout)),
    batch=st.integers(1, 4),
    mn=st.integers(0, 40),
    groups=st.integers(0, 20),
)
def test_scale_slots_are_distinct(numerics, form, batch: int, mn: int, groups: int) -> None:
    sizes, strides = layouts.scale_sizes_and_strides(batch, mn, groups, form)
    offsets = [
        numerics.scale_offset(int(form), groups, *strides, b, row, column)
        for b, row, column in itertools.product(*map(range, sizes))
    ]
    assert len(set(offsets)) == len(offsets)
    if form != layouts.ScaleLayout.ROW_MAJOR:
        assert strides[1] == 1 and strides[2] % layouts.TMA_ELEMENTS == 0


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
@example(-1, 0, 8)
@example(8, 0, 8)
@example(-(2**63), 2**31, 4)
@example(2**63 - 1, 0, 4)
def test_local_expert_never_wraps(numerics, expert_id: int, start: int, experts: int) -> None:
    expected = expert_id - start if start <= expert_id < start + experts else -1
    assert numerics.local_expert(expert_id, start, experts) == expected
