"""The grouped GEMMs with MX weights: MXFP8, and FP4 in int8 bytes, in both layouts.

Every block of a row has an exponent that no neighbour has, so a scale that is read from another
place changes the result by a power of two.
"""

from __future__ import annotations

import re

import pytest
import torch
from helpers import F8, same_bits
from hypothesis import given
from hypothesis import strategies as st

from dgmoe_ops.reference import gemm_terms
from dgmoe_ops.reference.scale import pack_words

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
RECIPES = {
    "mxfp8": ([1, 32], [1, 32]),
    "mxfp8_wide": ([1, 128], [1, 32]),
    "mxfp4": ([1, 128], [1, 32]),
    "mxfp4_fine": ([1, 32], [1, 32]),
    "mxfp4_row": ([1, 128], [1, 128]),
}
LAYOUTS = ("masked", "contig")


@pytest.fixture(autouse=True)
def cpu_only(device) -> None:
    if device.type == "cuda":
        pytest.skip("which GPU runs MX GEMMs, and with what sizes, is its backend's matter")


def op(layout: str) -> str:
    return f"grouped_gemm_nt_f8f8bf16_{layout}"


def exponents(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Bytes near 2^0 that differ from those of the next block, row and expert."""
    steps = sum(
        (torch.arange(size) * prime).view(-1, *(1,) * (len(shape) - at - 1))
        for at, (size, prime) in enumerate(zip(shape, (5, 3, 4)[-len(shape) :], strict=True))
    )
    return 121 + (steps + seed) % 13


class Operands:
    """Operands with exact values, and what they stand for in float64."""

    def __init__(self, recipe, layout, counts, m, n, k, seed=0, a_packed=True) -> None:
        g = torch.Generator().manual_seed(seed)
        self.layout, self.recipe = layout, RECIPES[recipe]
        columns_a, columns_b = self.recipe[0][1], self.recipe[1][1]
        experts = len(counts)
        masked = layout == "masked"
        if masked:
            self.where = torch.tensor(counts, dtype=torch.int32)
            self.valid = torch.arange(m) < self.where[:, None]
            owner = torch.arange(experts)[:, None].expand(experts, m)
        else:
            owner = torch.cat(
                [torch.full((-(-count // 8) * 8,), e) for e, count in enumerate(counts)]
                or [torch.empty(0, dtype=torch.int64)]
            )
            inside = [torch.arange(-(-c // 8) * 8) < c for c in counts]
            self.valid = torch.cat(inside) if inside else torch.empty(0, dtype=torch.bool)
            self.where = torch.where(self.valid, owner, -1).int()
        self.owner = owner
        rows = tuple(self.valid.shape)
        if recipe.startswith("mxfp4"):
            codes = torch.randint(0, 16, (experts, n, k), generator=g)
            self.b = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(torch.int8)
            b = torch.where(codes >= 8, -1.0, 1.0) * VALUES[codes % 8]
        else:
            b = torch.randint(-3, 4, (experts, n, k), generator=g).float()
            self.b = b.to(F8)
        self.a = torch.randint(-3, 4, (*rows, k), generator=g).float().to(F8)
        a_byte = exponents((*rows, -(-k // columns_a)), seed)
        b_byte = exponents((experts, n, -(-k // columns_b)), seed + 2)
        self.a_scale = pack_words(a_byte) if a_packed else torch.exp2(a_byte - 127.0)
        self.b_scale = pack_words(b_byte)
        # Padding is poison: NaN as a value, as fp32 scale and as exponent.
        self.a.view(torch.uint8)[~self.valid] = 0x7F
        self.a_scale.view(torch.int32)[~self.valid] = -1
        self.exact_a = self.a.double() * self.spread(a_byte, columns_a, k)
        self.exact_b = b.double() * self.spread(b_byte, columns_b, k)

    @staticmethod
    def spread(byte: torch.Tensor, columns: int, k: int) -> torch.Tensor:
        return torch.exp2(byte.double() - 127).repeat_interleave(columns, -1)[..., :k]

    @property
    def args(self) -> tuple:
        args = (self.a, self.a_scale, self.b, self.b_scale, self.where)
        return (*args, 3) if self.layout == "masked" else args

    def run(self, **recipes) -> torch.Tensor:
        recipes = recipes or {"recipe_a": self.recipe[0], "recipe_b": self.recipe[1]}
        return getattr(torch.ops.dgmoe, op(self.layout))(*self.args, **recipes)

    def check(self, got: torch.Tensor) -> None:
        """Every valid row within the error that a sum in fp32 may have, and bf16's half ulp."""
        rows, owner = self.exact_a[self.valid], self.owner[self.valid]
        exact = torch.einsum("rk,rnk->rn", rows, self.exact_b[owner])
        magnitude = torch.einsum("rk,rnk->rn", rows.abs(), self.exact_b[owner].abs())
        apart = (got[self.valid].double() - exact).abs()
        assert (apart <= exact.abs() * 2.0**-8 + magnitude * 2.0**-20).all()


cases = st.fixed_dictionaries(
    {
        "recipe": st.sampled_from(list(RECIPES)),
        "layout": st.sampled_from(LAYOUTS),
        "counts": st.lists(st.sampled_from([0, 0, 1, 3, 8, 131]), max_size=4),
        "n": st.sampled_from([0, 1, 8, 33]),
        "k": st.sampled_from([0, 2, 32, 34, 128, 192, 258, 384, 640]),
        "seed": st.integers(0, 1000),
        "a_packed": st.booleans(),
    }
)


@given(cases)
def test_every_block_has_its_own_scale(case) -> None:
    operands = Operands(m=max([*case["counts"], 1]), **case)
    got = operands.run()
    operands.check(got)
    terms = gemm_terms(
        *operands.args[:5], op=op(operands.layout),
        recipe_a=operands.recipe[0], recipe_b=operands.recipe[1],
    )  # fmt: skip
    exact, valid = terms[0][operands.valid], operands.valid  # the oracle says the same
    owner = operands.owner[valid]
    want = torch.einsum("rk,rnk->rn", operands.exact_a[valid], operands.exact_b[owner])
    assert torch.allclose(exact, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [2, 14, 18, 34, 62, 98, 130, 258])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_tail(recipe, k) -> None:
    """Widths that end inside a vector, a group and a word of scales, for few rows and for many."""
    for layout in LAYOUTS:
        operands = Operands(recipe, layout, [3, 0, 140], 140, 17, k, seed=k)
        operands.check(operands.run())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp4_names_its_default(layout) -> None:
    operands = Operands("mxfp4", layout, [3, 0, 5], 8, 24, 384)
    d = getattr(torch.ops.dgmoe, op(layout))(*operands.args)
    assert same_bits(d[operands.valid], operands.run()[operands.valid])


@pytest.mark.parametrize("high", [False, True])
def test_every_code_in_both_nibbles(high) -> None:
    """One value of b in a row, times one: each of the 16 codes by itself."""
    column = 6 + high
    a = torch.zeros(1, 32)
    a[0, column] = 1.0
    b = torch.zeros(1, 16, 16, dtype=torch.uint8)
    b[0, :, column // 2] = torch.arange(16) << (4 * high)
    where = torch.zeros(1, dtype=torch.int32)
    one, row_one = (torch.full(shape, 127, dtype=torch.int32) for shape in ((1, 1), (1, 16, 1)))
    d = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_contig(
        a.to(F8), one, b.view(torch.int8), row_one, where
    )
    assert torch.equal(d[0].float(), torch.cat((VALUES, -VALUES)))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_exponent_stays_in_its_row(recipe, layout) -> None:
    operands = Operands(recipe, layout, [5, 0, 4], 8, 24, 384)
    before = operands.run()
    row = int(operands.valid.flatten().nonzero()[6])
    operands.a_scale.flatten(0, -2).view(torch.uint8)[row, 1] = 255
    after = operands.run()
    assert after.flatten(0, -2)[row].isnan().all()
    keep = operands.valid.flatten().clone()
    keep[row] = False
    assert same_bits(after.flatten(0, -2)[keep], before.flatten(0, -2)[keep])


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_layouts_agree_and_batches_do_not_matter(recipe, monkeypatch) -> None:
    """A row has the same bits in both layouts, and under DGMOE_BATCH_INVARIANT at any count."""
    monkeypatch.setenv("DGMOE_BATCH_INVARIANT", "1")
    counts = [150, 0, 7]
    results = [Operands(recipe, layout, counts, 150, 40, 320) for layout in LAYOUTS]
    slab, segments = results
    segments.a[segments.valid] = slab.a[slab.valid]
    segments.a_scale[segments.valid] = slab.a_scale[slab.valid]
    whole = slab.run()[slab.valid]
    assert same_bits(segments.run()[segments.valid], whole)
    few = Operands(recipe, "masked", [3, 0, 7], 150, 40, 320)
    few.a, few.a_scale = slab.a, slab.a_scale
    assert same_bits(few.run()[0, :3], whole[:3])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"a": (..., slice(0, 383))},
            r"a must have an even number of columns for int8 b \(3, 24, 192\), two e2m1 codes a"
            r" byte, got \(.*383\)",
        ),
        (
            {"b": (..., slice(0, 191))},
            r"b must have k / 2 = 192 columns as int8, two e2m1 codes a byte, for a \(.*384\), got"
            r" \(3, 24, 191\)",
        ),
        ({"b_scale": "fp32"}, "b_scale must be packed UE8M0 int32 for int8 b, .*got float32"),
        ({"b_scale": (..., slice(0, 2))}, r"b_scale must have shape \(experts, 24, 3\)"),
        ({"a_scale": (..., slice(0, 0))}, r"a_scale must have shape \(.*, 1\)"),
        ({"recipe_b": [128, 32]}, "recipe_b must have one scale a row for int8 b, got 128"),
        ({"b": "uint8"}, "b must be float8_e4m3fn or int8, got uint8"),
        ({"a": "int8"}, "a must be float8_e4m3fn, got int8"),
    ],
)
def test_refusals(layout, change, says) -> None:
    operands = Operands("mxfp4", layout, [3, 0, 5], 8, 24, 384)
    recipes = {"recipe_a": [1, 128], "recipe_b": [1, 32]}
    for arg, how in change.items():
        if arg.startswith("recipe"):
            recipes[arg] = how
            continue
        tensor = getattr(operands, arg)
        if how == "fp32":
            changed = torch.ones(3, 24, 12)
        elif isinstance(how, str):
            changed = tensor.view(getattr(torch, how))
        else:
            changed = tensor.view(torch.uint8)[how] if arg == "a" else tensor[how]
            changed = (changed.view(F8) if arg == "a" else changed).contiguous()
        setattr(operands, arg, changed)
    with pytest.raises(ValueError, match=rf"dgmoe::{op(layout)}: {says}") as refusal:
        operands.run(**recipes)
    assert re.search("got ", str(refusal.value))


def test_dense_gemms_take_no_fp4() -> None:
    a, b = torch.zeros(4, 64).to(F8), torch.zeros(8, 32, dtype=torch.int8)
    scale = torch.ones(4, 1), torch.ones(1, 1)
    with pytest.raises(ValueError, match="b must be float8_e4m3fn, got int8"):
        torch.ops.dgmoe.gemm_nt_f8f8bf16(a, scale[0], b, scale[1])
