"""Samples of the gemm room. On CUDA the shapes are those that DeepGEMM takes on SM90."""

from __future__ import annotations

import torch

from ...reference.scale import pack_words
from ._make import (
    STRIDES,
    Sample,
    counts,
    generator,
    poison_padding,
    segments,
    with_strides,
)


def _grid(shape: tuple[int, ...]) -> torch.Tensor:
    """Return int64 numbers that differ between neighbouring coordinates of every dimension."""
    out = torch.zeros(shape, dtype=torch.int64)
    for dim, prime in enumerate((7, 5, 3)[-len(shape) :]):
        steps = torch.arange(shape[dim]) * prime
        out += steps.view(*(1,) * dim, -1, *(1,) * (len(shape) - dim - 1))
    return out


def _scales(batch, mn: int, groups: int, packed: bool) -> torch.Tensor:
    """Return scales that differ by coordinate, so that none can stand in for another."""
    grid = _grid((*batch, mn, groups))
    if packed:
        return pack_words(120 + grid % 11)
    return 0.01 * (1 + (grid % 31) / 8.0).float() * torch.exp2((grid % 7 - 3).float())


def _values(shape, rng) -> torch.Tensor:
    return torch.randn(shape, generator=rng)


def _legal(device, m: int, n: int, k: int, alignment: int, strides: str):
    if torch.device(device).type == "cpu":
        return m, n, k, alignment, strides
    return (
        -(-m // 256) * 256, -(-n // 128) * 128, max(128, -(-k // 128) * 128), 128, "transposed",
    )  # fmt: skip


def _operands(device, seed, masked, fp8, experts, m, n, k, alignment, strides, recipe, packed):
    """Return a, a_scale, b, b_scale, row info; scales None for bf16."""
    most = m
    m, n, k, alignment, strides = _legal(device, m, n, k, alignment, strides)
    rng = generator(seed)
    if masked:
        info = counts(experts, min(m, most), rng)
        valid = torch.arange(m) < info.unsqueeze(-1)
    else:
        info = segments(experts, most, alignment, rng)
        valid = info >= 0
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    a = poison_padding(_values((*valid.shape, k), rng).to(dtype), valid)
    b = _values((experts, n, k), rng).to(dtype)
    if not fp8:
        return a.to(device), None, b.to(device), None, info.to(device)
    gran_a, (gran_mn, gran_b) = recipe[0][1], recipe[1]
    a_scale = _scales(valid.shape[:-1], valid.shape[-1], -(-k // gran_a), packed)
    a_scale = poison_padding(a_scale, valid)
    b_scale = _scales((experts,), -(-n // gran_mn), -(-k // gran_b), packed)
    return (
        a.to(device),
        with_strides(a_scale.to(device), strides),
        b.to(device),
        with_strides(b_scale.to(device), "dense" if strides == "transposed" else strides),
        info.to(device),
    )


_RECIPES = {
    "block": ((1, 128), (128, 128)),
    "row": ((1, 128), (1, 128)),
    "mx": ((1, 32), (1, 32)),
    "mixed": ((1, 128), (1, 32)),
}


def _fp8(
    masked, device, *, seed, experts=3, m=5, n=24, k=192, alignment=8, strides="dense",
    recipe="block", packed=False, explicit=False,
):  # fmt: skip
    grains = _RECIPES[recipe]
    args = _operands(
        device, seed, masked, True, experts, m, n, k, alignment, strides, grains, packed
    )
    # The defaults: block, or row where the weight scales are packed.
    explicit = explicit or grains != _RECIPES["row" if packed else "block"]
    kwargs = {"recipe_a": list(grains[0]), "recipe_b": list(grains[1])} if explicit else {}
    return (*args, *((max(1, m),) if masked else ())), kwargs


def _bf16(masked, device, *, seed, experts=3, m=5, n=24, k=192, alignment=8):
    a, _, b, _, info = _operands(
        device, seed, masked, False, experts, m, n, k, alignment, "dense", None, False
    )
    return (a, b, info, *((max(1, m),) if masked else ())), {}


def _masked_fp8(device, **case):
    return _fp8(True, device, **case)


def _contig_fp8(device, **case):
    return _fp8(False, device, **case)


def _masked_bf16(device, **case):
    return _bf16(True, device, **case)


def _contig_bf16(device, **case):
    return _bf16(False, device, **case)


_SHAPES = [
    {"experts": 0},
    {"m": 0},
    {"n": 0},
    {"k": 0},
    {"experts": 1, "m": 1, "n": 1, "k": 1},
    {"k": 7, "n": 9},
    {"k": 32, "n": 130},
    {"experts": 5, "m": 19, "k": 576, "n": 140},
    {"m": 130, "k": 128, "n": 8},
]
_FP8_SHAPES = [
    *_SHAPES,
    {"k": 192, "strides": "transposed", "explicit": True},
    {"k": 300, "n": 140, "strides": "sliced"},
    {"k": 576, "strides": "stepped", "recipe": "row"},
    {"k": 700, "packed": True, "recipe": "row"},
    {"k": 700, "packed": True, "recipe": "row", "strides": "transposed", "explicit": True},
    {"k": 200, "packed": True, "recipe": "mx", "strides": "sliced"},
    {"k": 200, "packed": True, "recipe": "mixed"},
    {"k": 100, "recipe": "mx"},
]
_CUDA_SHAPES = [
    {"experts": 1, "m": 1, "n": 128, "k": 128},
    {"experts": 5, "m": 19, "k": 576, "n": 256},
    {"m": 300, "k": 384, "n": 128},
]
_SPACE = {
    "experts": range(0, 5),
    "m": (0, 1, 3, 9),
    "n": (0, 1, 8, 33, 130),
    "k": (0, 1, 7, 32, 128, 192, 300),
    "alignment": (4, 8, 128),
}


#: few sizes: each makes the library compile a kernel
_CUDA_SPACE = {"experts": (1, 3), "m": (0, 1, 9, 300), "n": (128,), "k": (128, 384)}


class _GemmSample(Sample):
    """On CUDA the cases are shapes and scales that SM90 takes; it refuses the rest."""

    def edge(self, device="cpu"):
        cases = self.edge_cases if torch.device(device).type == "cpu" else _CUDA_SHAPES
        return [self.build(device, seed=seed, **case) for seed, case in enumerate(cases)]

    def random(self, draw, device="cpu"):
        on_cpu = torch.device(device).type == "cpu"
        return self.draw(draw, device, self.space if on_cpu else _CUDA_SPACE)


def _fp8_sample(build) -> Sample:
    space = {
        **_SPACE,
        "strides": STRIDES,
        "recipe": tuple(_RECIPES),
        "packed": (False, True),
        "explicit": (False, True),
    }
    return _GemmSample(build, {}, _FP8_SHAPES, space)


SAMPLES = {
    "grouped_gemm_nt_f8f8bf16_masked": _fp8_sample(_masked_fp8),
    "grouped_gemm_nt_f8f8bf16_contig": _fp8_sample(_contig_fp8),
    "grouped_gemm_nt_bf16_masked": _GemmSample(_masked_bf16, {}, _SHAPES, _SPACE),
    "grouped_gemm_nt_bf16_contig": _GemmSample(_contig_bf16, {}, _SHAPES, _SPACE),
}
