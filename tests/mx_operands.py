"""Grouped GEMMs with MX weights for tests on any device: operands with poison in every row that is
not valid, and the check of a result."""

from __future__ import annotations

import torch
from helpers import F8

from dgmoe_ops.formats.layouts import ScaleLayout, scale_sizes_and_strides
from dgmoe_ops.reference import gemm_terms
from dgmoe_ops.reference.scale import pack_words

LAYOUTS = ("masked", "contig")
RECIPES = {
    "mxfp8": ([1, 32], [1, 32]),
    "mxfp8_wide": ([1, 128], [1, 32]),
    "mxfp4": ([1, 128], [1, 32]),
}
NAN = 0x7F
SLACK = 2.0**-11  # of |a| |b|: an fp8 tensor core keeps some 13 bits of a partial sum


def mn_major(words: torch.Tensor, device) -> torch.Tensor:
    """The same words as the kernels of a GPU take them."""
    batch = words.shape[0] if words.dim() == 3 else None
    groups = 4 * words.shape[-1]
    sizes, strides = scale_sizes_and_strides(
        batch, words.shape[-2], groups, ScaleLayout.PACKED_UE8M0
    )
    return torch.empty_strided(sizes, strides, dtype=torch.int32, device=device).copy_(words)


class Product:
    def __init__(
        self,
        recipe: str,
        layout: str,
        counts: list[int],
        n: int,
        k: int,
        expected_m: int | None = None,
    ) -> None:
        g = torch.Generator().manual_seed(n + k)
        self.layout, self.recipe = layout, RECIPES[recipe]
        self.fp4 = recipe == "mxfp4"
        experts, self.k, most = len(counts), k, max(counts)
        self.expected_m = most if expected_m is None else expected_m
        if layout == "masked":
            m = -(-most // 128) * 128
            self.where = torch.tensor(counts, dtype=torch.int32)
            self.valid = torch.arange(m) < self.where[:, None]
        else:
            padded = [-(-count // 128) * 128 for count in counts]
            self.where = torch.full((sum(padded),), -1, dtype=torch.int32)
            at = 0
            for expert, (count, rows) in enumerate(zip(counts, padded, strict=True)):
                self.where[at : at + count] = expert
                at += rows
            self.valid = self.where >= 0
        rows = tuple(self.valid.shape)
        self.a = torch.randn((*rows, k), generator=g).to(F8)
        if self.fp4:
            self.b = torch.randint(-128, 128, (experts, n, k // 2), generator=g, dtype=torch.int8)
        else:
            self.b = torch.randn((experts, n, k), generator=g).to(F8)
        groups = k // self.recipe[0][1]
        self.a_byte = torch.randint(121, 134, (*rows, groups), generator=g)
        self.b_byte = torch.randint(115, 128, (experts, n, k // 32), generator=g)
        self.a.view(torch.uint8)[~self.valid] = NAN
        self.a_byte[~self.valid] = 255
        #: (row of a, column) of the valid rows
        self.row = self.valid.nonzero()

    def check(self, device: torch.device) -> torch.Tensor:
        packed = [pack_words(byte) for byte in (self.a_byte, self.b_byte)]
        args = [self.a, packed[0], self.b, packed[1], self.where]
        recipes = {"recipe_a": self.recipe[0], "recipe_b": self.recipe[1]}
        op = f"grouped_gemm_nt_f8f8bf16_{self.layout}"
        exact, size = (x[self.valid] for x in gemm_terms(*args, op=op, **recipes)[:2])
        given = [x.to(device) for x in args]
        given[1], given[3] = (mn_major(x, device) for x in packed)
        if self.layout == "masked":
            given.append(self.expected_m)
        run = getattr(torch.ops.dgmoe, op)
        got = run(*given, **recipes)
        again = run(*given, **recipes)
        valid = self.valid.to(device)
        assert torch.equal(got[valid].view(torch.int16), again[valid].view(torch.int16))
        got = got.cpu()[self.valid].double()
        nan = exact.isnan()
        assert torch.equal(got.isnan(), nan)
        apart = (got - exact).abs()[~nan]
        assert (apart <= (exact.abs() * 2.0**-8 + size * SLACK)[~nan] + 2.0**-133).all()
        return got
