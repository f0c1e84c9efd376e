"""sm90_mx_small_m and sm90_mx_medium_m: every tile height, ragged rows, odd n."""

from __future__ import annotations

import pytest
import torch
from helpers import F8

from dgmoe_ops.reference import gemm_terms
from dgmoe_ops.reference.scale import pack_words

#: recipe: columns of a that share a scale
RECIPES = {"mxfp8": 32, "mxfp8_wide": 128, "mxfp4": 128}
EXPECTED_M = (1, 8, 40)  # small M in each tile height, with either width of weights; medium
#: small and medium M in either layout, in contiguous segments also tiles of 16 of the former, and
#: every tile height of the latter
RAGGED = [
    (130, 0, 3, 17, 1, 0, 40, 256, 8, 0, 9, 33, 128, 64, 5, 200),
    (130, 0, 3, 17, 1, 0, 0, 256, 8, 0, 9, 33),
    (3, 0, 130, 17, 1),
    (0, 0, 0, 0, 0),
    (0, 40, 0, 17, 0, 1, 0),
    (0, 256, 8, 0, 9),
    (33, 1, 0, 2, 64),
    (49, 65, 0, 81, 97, 48),
]


@pytest.fixture(autouse=True)
def needs_hopper(device):
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("runs with --device cuda on an SM90 GPU")


def exponents(shape, low, high, g):
    return torch.randint(low, high + 1, shape, generator=g)


class Operands:
    """Random bytes; scales that differ everywhere; poison in every row that is not valid."""

    def __init__(self, recipe, masked, counts, m, n, k, device, seed=0, near=(118, 131)) -> None:
        g = torch.Generator().manual_seed(seed)
        columns, experts = RECIPES[recipe], len(counts)
        self.masked = masked
        self.name = f"grouped_gemm_nt_f8f8bf16_{'masked' if masked else 'contig'}"
        self.recipes = {"recipe_a": [1, columns], "recipe_b": [1, 32]}
        if masked:
            info = torch.tensor(counts, dtype=torch.int32)
            self.valid = torch.arange(m) < info[:, None]
        else:
            info = torch.cat(
                [
                    torch.where(torch.arange(-(-c // 128) * 128) < c, e, -1)
                    for e, c in enumerate(counts)
                ]
                + [torch.full((128,), -1)]
            ).int()
            self.valid = info >= 0
        rows = tuple(self.valid.shape)
        a = torch.randint(0, 256, (*rows, k), generator=g, dtype=torch.uint8)
        a[a & 127 == 127] ^= 1
        a[~self.valid] = 127
        if recipe == "mxfp4":
            b = torch.randint(-128, 128, (experts, n, k // 2), generator=g, dtype=torch.int8)
        else:
            b = torch.randint(0, 256, (experts, n, k), generator=g, dtype=torch.uint8)
            b[b & 127 == 127] ^= 1
            b = b.view(F8)
        self.a_bytes = exponents((*rows, k // columns), *near, g)
        self.b_bytes = exponents((experts, n, k // 32), *near, g)
        self.device, self.info = device, info.to(device)
        self.a, self.b = a.view(F8).to(device), b.to(device)

    def args(self, expected_m=1):
        a_scale = pack_words(self.a_bytes).to(self.device)
        b_scale = pack_words(self.b_bytes).to(self.device)
        args = (self.a, a_scale, self.b, b_scale, self.info)
        return (*args, expected_m) if self.masked else args

    def run(self, expected_m=1):
        return getattr(torch.ops.dgmoe, self.name)(*self.args(expected_m), **self.recipes)

    def check(self, got: torch.Tensor) -> None:
        args = [x.cpu() for x in self.args()[:5]]
        exact, size = gemm_terms(*args, op=self.name, **self.recipes)
        got, exact, size = (x[self.valid].double() for x in (got.cpu(), exact, size))
        assert torch.equal(got.isnan(), exact.isnan())
        # The tensor core keeps some 13 bits of a group's sum.
        apart = (got - exact).abs() <= exact.abs() * 2.0**-8 + size * 2.0**-11
        assert (apart | exact.isnan()).all()


def from_python(call) -> bool:
    """Whether a call went through Python."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any("_run" in event.key and "dgmoe::_" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("counts", RAGGED)
@pytest.mark.parametrize(("n", "k"), [(192, 512), (72, 128), (8, 384), (200, 640)])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "contig"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ragged_rows(recipe, masked, n, k, counts, device) -> None:
    operands = Operands(recipe, masked, counts, 256, n, k, device, seed=n + k)
    for expected_m in EXPECTED_M if masked else (1,):
        operands.check(operands.run(expected_m))


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_experts(recipe, device) -> None:
    counts = [e % 40 if e % 3 else 0 for e in range(300)]
    for masked in (True, False):
        operands = Operands(recipe, masked, counts, 40, 72, 256, device)
        operands.check(operands.run())


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "contig"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_ends_of_the_exponents(recipe, masked, device) -> None:
    """Byte 0 is 2^-127 and byte 255 NaN; bytes of a row may lie 200 apart."""
    operands = Operands(recipe, masked, [5, 0, 9], 16, 72, 512, device)
    operands.b_bytes[0, 3, 2], operands.b_bytes[2, 70, 0], operands.b_bytes[2, 9, 15] = 0, 255, 20
    operands.b_bytes[2, 9, 14] = 220
    first = int(operands.valid.flatten().nonzero()[2])
    operands.a_bytes.flatten(0, -2)[first, 1] = 255
    operands.a_bytes.flatten(0, -2)[first + 1] = 0
    for expected_m in (1, 40) if masked else (1,):
        operands.check(operands.run(expected_m))


@pytest.mark.parametrize("expected_m", [1, 40], ids=["few", "some"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_need_no_python_and_no_warm_up(recipe, expected_m, device) -> None:
    """The first call of a shape may be captured, and replays follow the routing."""
    operands = Operands(recipe, True, [3, 0, 7, 1], 128, 136, 256, device, seed=5)
    args = operands.args(expected_m)
    op = getattr(torch.ops.dgmoe, operands.name)
    assert not from_python(lambda: op(*args, **operands.recipes))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = op(*args, **operands.recipes)
    again = Operands(recipe, True, [0, 128, 2, 31], 128, 136, 256, device, seed=6)
    for old, new in zip(args[:5], again.args()[:5], strict=True):
        old.copy_(new)
    graph.replay()
    again.check(d)


@pytest.mark.parametrize("expected_m", [1, 40], ids=["few", "some"])
def test_bits_do_not_depend_on_the_run(expected_m, device) -> None:
    operands = Operands("mxfp4", True, [3, 0, 100, 17, 1], 128, 192, 512, device)
    first = operands.run(expected_m)
    valid = operands.valid.to(device)
    for _ in range(20):
        assert torch.equal(operands.run(expected_m)[valid], first[valid])


@pytest.mark.parametrize("expected_m", [1, 40], ids=["few", "some"])
def test_rows_after_the_valid_ones_are_not_written(expected_m, device) -> None:
    operands = Operands("mxfp4", True, [3, 0, 100, 17, 1], 128, 192, 512, device)
    out = torch.full((5, 128, 192), 7.0, device=device, dtype=torch.bfloat16)
    op = getattr(torch.ops.dgmoe, operands.name)
    op.out(*operands.args(expected_m), **operands.recipes, out=out)
    assert (out[~operands.valid.to(device)] == 7).all()
    operands.check(out)
