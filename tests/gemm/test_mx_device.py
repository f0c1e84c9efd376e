"""The grouped GEMMs with MX weights on the device under test: small, medium and large M,
and what no fast path can stand for: NaN values and scales, exponents far apart, scales of zeros."""

from __future__ import annotations

import pytest
import torch
from helpers import F8
from mx_operands import LAYOUTS, NAN, RECIPES, Product, mn_major

from dgmoe_ops.formats.layouts import ScaleLayout, scale_sizes_and_strides
from dgmoe_ops.reference.scale import pack_words

#: rows of experts, a tile of each size; and of how many a masked call is told
COUNTS = {
    "few": ([3, 0, 12, 1], 5),
    "some": ([40, 0, 20, 1, 60, 72, 90, 128, 150], 50),
    "many": ([150, 0, 384, 1, 190, 100, 70, 90, 135, 170, 210, 300], 384),
}


@pytest.fixture(params=[(c, r, x) for c in COUNTS for r in RECIPES for x in LAYOUTS])
def product(request) -> Product:
    count, recipe, layout = request.param
    counts, expected_m = COUNTS[count]
    return Product(recipe, layout, counts, 200, 640, expected_m)


def test_ragged_rows(product, device) -> None:
    product.check(device)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_more_tiles_than_are_listed_at_once(recipe, device) -> None:
    """More experts, segments and tiles than threads list them, and runs of one expert across."""
    counts = [(0, 130, 1, 256, 300, 129)[e % 6] for e in range(290)]
    Product(recipe, "masked", counts, 8, 128).check(device)
    Product(recipe, "masked", counts, 8, 128, expected_m=40).check(device)
    counts[60] = 9000
    Product(recipe, "contig", counts, 8, 128).check(device)
    as_many_segments = [(0, 130, 1, 100, 90, 128)[e % 6] for e in range(290)]
    Product(recipe, "contig", as_many_segments, 8, 128).check(device)


@pytest.mark.parametrize(("expected_m", "k"), [(40, 2048), (100, 1024)], ids=["some", "many"])
def test_slabs_that_share_the_workspace(expected_m, k, device) -> None:
    """Slabs of more than 8 GiB when prepared go by parts, and give what small ones do."""
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 32 << 30:
        pytest.skip("takes 25 GiB of a GPU's memory")
    small = Product("mxfp4", "masked", [3, 0, 128, 1, 77], 200, k)
    a, b, where = (x.to(device) for x in (small.a, small.b, small.where))
    scales = [mn_major(pack_words(byte), device) for byte in (small.a_byte, small.b_byte)]
    rows = 2**20
    big = torch.empty((5, rows, small.k), dtype=F8, device=device)
    big[:, :128] = a
    sizes, strides = scale_sizes_and_strides(5, rows, small.k // 128, ScaleLayout.PACKED_UE8M0)
    big_scale = torch.empty_strided(sizes, strides, dtype=torch.int32, device=device)
    big_scale[:, :128] = scales[0]
    run = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_masked
    recipes = {"recipe_a": small.recipe[0], "recipe_b": small.recipe[1]}
    want = run(a, scales[0], b, scales[1], where, expected_m, **recipes)
    got = run(big, big_scale, b, scales[1], where, expected_m, **recipes)[:, :128]
    valid = small.valid.to(device)
    assert torch.equal(got[valid].view(torch.int16), want[valid].view(torch.int16))


@pytest.mark.parametrize("n, k", [(8, 128), (256, 256), (264, 1152), (1024, 2048)])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_sizes(recipe, n, k, device) -> None:
    for layout in LAYOUTS:
        Product(recipe, layout, [0, 400, 300], n, k).check(device)  # many, in either layout
        Product(recipe, layout, [0, 200, 130], n, k, expected_m=50).check(device)  # some
        Product(recipe, layout, [0, 12, 9], n, k).check(device)  # few


def test_a_nan_of_a_stays_in_its_row(product, device) -> None:
    at = tuple(product.row[1].tolist())
    product.a.view(torch.uint8)[at][5] = NAN | 0x80
    other = tuple(product.row[3].tolist())
    product.a_byte[other][1] = 255
    got = product.check(device)
    assert got[1].isnan().all() and got[3].isnan().all() and not got[0].isnan().any()


def test_a_nan_of_b_stays_in_its_column(product, device) -> None:
    product.b_byte[0, 7, 3] = 255
    if not product.fp4:
        product.b.view(torch.uint8)[0, 130, 77] = NAN
    got = product.check(device)
    assert got[0, 7].isnan() and got[0, 130].isnan() == (not product.fp4)
    assert got[0].isnan().sum() == 2 - product.fp4


def test_exponents_far_apart(product, device) -> None:
    g = torch.Generator().manual_seed(0)
    product.b_byte[0] = torch.randint(90, 165, product.b_byte[0].shape, generator=g)
    at = tuple(product.row[2].tolist())
    product.a_byte[at] = torch.randint(90, 165, product.a_byte[at].shape, generator=g)
    product.check(device)


@pytest.mark.parametrize("byte", [0, 1, 200, 254])
def test_the_scale_of_zeros_does_not_matter(product, device, byte) -> None:
    product.b[0, 9].view(torch.uint8)[32 if product.fp4 else 64 :] = 0
    product.b_byte[0, 9, 2:] = byte
    at = tuple(product.row[0].tolist())
    product.a.view(torch.uint8)[at][128:] = 0x80
    product.a_byte[at][128 // product.recipe[0][1] :] = byte
    product.check(device)


def test_it_is_captured(product, device) -> None:
    if device.type != "cuda":
        pytest.skip("the CPU captures nothing")
    product.check(device)
    graph = torch.cuda.CUDAGraph()
    args = [product.a, pack_words(product.a_byte), product.b, pack_words(product.b_byte)]
    given = [x.to(device) for x in args]
    given[1], given[3] = mn_major(args[1], device), mn_major(args[3], device)
    given.append(product.where.to(device))
    if product.layout == "masked":
        given.append(product.expected_m)
    run = getattr(torch.ops.dgmoe, f"grouped_gemm_nt_f8f8bf16_{product.layout}")
    recipes = {"recipe_a": product.recipe[0], "recipe_b": product.recipe[1]}
    before = run(*given, **recipes)
    with torch.cuda.graph(graph):
        d = run(*given, **recipes)
    d.zero_()
    graph.replay()
    valid = product.valid.to(device)
    assert torch.equal(d[valid].view(torch.int16), before[valid].view(torch.int16))
