"""Samples of the gemm room. On CUDA the shapes are those that DeepGEMM takes on SM90."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...reference.scale import pack_words
from ._make import STRIDES, Sample, counts, generator, poison_padding, segments, with_strides


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
        -(-m // 256) * 256, -(-n // 128) * 128, max(128, -(-k // 128) * 128), 128, "tma",
    )  # fmt: skip


def _codes(shape: tuple[int, ...], rng) -> torch.Tensor:
    """Return int8 rows of shape[-1] e2m1 codes, two a byte."""
    *outer, k = shape
    byte = torch.randint(0, 256, (*outer, k // 2), generator=rng)
    return byte.to(torch.uint8).view(torch.int8)


def _operands(
    device, seed, masked, fp8, experts, m, n, k, alignment, strides, recipe, packed, fp4=False
):
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
    b = _codes((experts, n, k), rng) if fp4 else _values((experts, n, k), rng).to(dtype)
    if not fp8:
        return a.to(device), None, b.to(device), None, info.to(device)
    gran_a, (gran_mn, gran_b) = recipe[0][1], recipe[1]
    a_scale = _scales(valid.shape[:-1], valid.shape[-1], -(-k // gran_a), packed)
    a_scale = poison_padding(a_scale, valid)
    b_scale = _scales((experts,), -(-n // gran_mn), -(-k // gran_b), packed or fp4)
    return (
        a.to(device),
        with_strides(a_scale.to(device), strides),
        b.to(device),
        with_strides(b_scale.to(device), "dense" if strides in ("transposed", "tma") else strides),
        info.to(device),
    )


_RECIPES = {
    "block": ((1, 128), (128, 128)),
    "row": ((1, 128), (1, 128)),
    "mx": ((1, 32), (1, 32)),
    "mixed": ((1, 128), (1, 32)),
}
_FP4_RECIPES = {
    "fp4": ((1, 128), (1, 32)),
    "fp4_mx": ((1, 32), (1, 32)),
    "fp4_row": ((1, 128), (1, 128)),
}
_GROUPED_RECIPES = {**_RECIPES, **_FP4_RECIPES}


def _fp8(
    masked, device, *, seed, experts=3, m=5, n=24, k=192, alignment=8, strides="dense",
    recipe="block", packed=False, explicit=False,
):  # fmt: skip
    grains, fp4 = _GROUPED_RECIPES[recipe], recipe in _FP4_RECIPES
    k += k % 2 if fp4 else 0
    args = _operands(
        device, seed, masked, True, experts, m, n, k, alignment, strides, grains, packed, fp4
    )
    # The defaults: block, or row where the weight scales are packed; fp4 for FP4 weights.
    default = "fp4" if fp4 else "row" if packed else "block"
    explicit = explicit or grains != _GROUPED_RECIPES[default]
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


def _dense_fp8(
    device, *, seed, m=5, n=24, k=192, strides="dense", recipe="block", packed=False,
    explicit=False, default="block",
):  # fmt: skip
    _, n, k, _, strides = _legal(device, m, n, k, 1, strides)
    if strides == "tma":
        m = -(-m // 4) * 4  # so that copies, which close gaps, keep the strides
    rng, grains = generator(seed), _RECIPES[recipe]
    a, b = (_values(shape, rng).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    (gran_a, (gran_mn, gran_b)) = grains[0][1], grains[1]
    a_scale = _scales((), m, -(-k // gran_a), packed)
    b_scale = _scales((), -(-n // gran_mn), -(-k // gran_b), packed)
    if recipe == "mx" and not packed:
        a_scale, b_scale = (torch.exp2(scale.log2().round()) for scale in (a_scale, b_scale))
    explicit = explicit or grains != _RECIPES["row" if packed and default == "block" else default]
    return (
        a.to(device),
        with_strides(a_scale.to(device), strides),
        b.to(device),
        with_strides(b_scale.to(device), "dense" if strides in ("transposed", "tma") else strides),
    ), {"recipe_a": list(grains[0]), "recipe_b": list(grains[1])} if explicit else {}


def _mxfp8(device, **case):
    return _dense_fp8(device, recipe="mx", default="mx", **case)


def _dense_bf16(device, *, seed, m=5, n=24, k=192):
    _, n, k, _, _ = _legal(device, m, n, k, 1, "dense")
    rng = generator(seed)
    return tuple(_values(shape, rng).bfloat16().to(device) for shape in ((m, k), (n, k))), {}


def _hc_prenorm(device, *, seed, m=5, n=24, k=192, num_splits=None):
    if torch.device(device).type != "cpu":
        n, k = max(8, -(-n // 8) * 8), max(64, -(-k // 64) * 64)
    rng = generator(seed)
    x, fn = _values((m, k), rng).bfloat16(), _values((n, k), rng)
    kwargs = {} if num_splits is None else {"num_splits": num_splits}
    return (x.to(device), fn.to(device)), kwargs


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
    {"k": 0, "recipe": "fp4"},
    {"k": 2, "n": 1, "m": 1, "experts": 1, "recipe": "fp4"},
    {"k": 384, "recipe": "fp4", "packed": True},
    {"k": 200, "recipe": "fp4", "packed": True, "strides": "sliced", "explicit": True},
    {"k": 98, "n": 33, "recipe": "fp4_mx", "packed": True, "strides": "transposed"},
    {"k": 258, "recipe": "fp4_row", "strides": "stepped"},
]
_CUDA_SHAPES = [
    {"experts": 1, "m": 1, "n": 128, "k": 128},
    {"experts": 5, "m": 19, "k": 576, "n": 256},
    {"m": 300, "k": 384, "n": 128},
]
_DENSE_SHAPES = [
    {"m": 0},
    {"n": 0},
    {"k": 0},
    {"m": 1, "n": 1, "k": 1},
    {"m": 7, "k": 7, "n": 9},
    {"m": 64, "k": 33, "n": 130},
    {"m": 129, "k": 300, "n": 140},
]
_DENSE_SCALES = [
    {"k": 192, "strides": "transposed"},
    {"k": 300, "n": 140, "strides": "sliced"},
    {"k": 576, "strides": "stepped"},
    {"k": 700, "packed": True},
    {"k": 700, "packed": True, "strides": "transposed"},
]
_DENSE_RECIPES = [
    {"k": 192, "explicit": True},
    {"k": 300, "n": 140, "recipe": "row"},
    {"k": 700, "packed": True, "recipe": "row", "strides": "sliced"},
    {"k": 200, "packed": True, "recipe": "mx"},
    {"k": 200, "packed": True, "recipe": "mixed"},
    {"k": 100, "recipe": "mx"},
]
_HC_SHAPES = [
    *_DENSE_SHAPES,
    *({"k": 576, "num_splits": splits} for splits in (1, 2, 5, 9, 12)),
    {"m": 129, "n": 33, "k": 300, "num_splits": 3},
    {"m": 0, "num_splits": 3},
    {"n": 0, "num_splits": 2},
    {"k": 0, "num_splits": 2},
]
_SPACE = {
    "experts": range(0, 5),
    "m": (0, 1, 3, 9),
    "n": (0, 1, 8, 33, 130),
    "k": (0, 1, 7, 32, 128, 192, 300),
    "alignment": (4, 8, 128),
}


_DENSE_SPACE = {
    "m": (0, 1, 7, 64, 129),
    "n": (0, 1, 8, 33, 130),
    "k": (0, 1, 7, 32, 65, 128, 300),
}
#: few sizes: each makes the library compile a kernel
_CUDA_SPACE = {"experts": (1, 3), "m": (0, 1, 9, 300), "n": (128,), "k": (128, 384)}
_DENSE_CUDA_SPACE = {"m": (0, 1, 9, 300), "n": (128,), "k": (128, 384)}
_DENSE_CUDA_SHAPES = [
    {"m": 1, "n": 128, "k": 128},
    {"m": 19, "n": 256, "k": 576},
    {"m": 300, "n": 128, "k": 384},
]
_HC_CUDA_SHAPES = [
    {"m": 1, "n": 8, "k": 64},
    {"m": 300, "n": 24, "k": 576},
    {"m": 19, "n": 24, "k": 576, "num_splits": 5},
    {"m": 0, "num_splits": 3},
]


@dataclass(frozen=True)
class _GemmSample(Sample):
    """On CUDA the cases are shapes and scales that SM90 takes; it refuses the rest."""

    cuda_cases: Sequence[dict] = tuple(_CUDA_SHAPES)
    cuda_space: dict[str, Sequence] = field(default_factory=lambda: _CUDA_SPACE)

    def edge(self, device="cpu"):
        cases = self.edge_cases if torch.device(device).type == "cpu" else self.cuda_cases
        return [self.build(device, seed=seed, **case) for seed, case in enumerate(cases)]

    def random(self, draw, device="cpu"):
        on_cpu = torch.device(device).type == "cpu"
        return self.draw(draw, device, self.space if on_cpu else self.cuda_space)


def _fp8_sample(build) -> Sample:
    space = {
        **_SPACE,
        "strides": STRIDES,
        "recipe": tuple(_GROUPED_RECIPES),
        "packed": (False, True),
        "explicit": (False, True),
    }
    return _GemmSample(build, {}, _FP8_SHAPES, space)


def _dense_sample(build, edge_cases, extra_space) -> Sample:
    space = {**_DENSE_SPACE, **extra_space}
    return _GemmSample(build, {}, edge_cases, space, _DENSE_CUDA_SHAPES, _DENSE_CUDA_SPACE)


_SCALE_SPACE = {"strides": STRIDES, "packed": (False, True)}
_RECIPE_SPACE = {**_SCALE_SPACE, "recipe": tuple(_RECIPES), "explicit": (False, True)}
_HC_SPACE = {"num_splits": (None, 1, 2, 3, 7)}

SAMPLES = {
    "grouped_gemm_nt_f8f8bf16_masked": _fp8_sample(_masked_fp8),
    "grouped_gemm_nt_f8f8bf16_contig": _fp8_sample(_contig_fp8),
    "grouped_gemm_nt_bf16_masked": _GemmSample(_masked_bf16, {}, _SHAPES, _SPACE),
    "grouped_gemm_nt_bf16_contig": _GemmSample(_contig_bf16, {}, _SHAPES, _SPACE),
    "gemm_nt_f8f8bf16": _dense_sample(
        _dense_fp8, [*_DENSE_SHAPES, *_DENSE_SCALES[:3], *_DENSE_RECIPES], _RECIPE_SPACE
    ),
    "gemm_nt_mxfp8_f8f8bf16": _dense_sample(_mxfp8, [*_DENSE_SHAPES, *_DENSE_SCALES], _SCALE_SPACE),
    "gemm_nt_bf16bf16f32": _dense_sample(_dense_bf16, _DENSE_SHAPES, {}),
    "tf32_hc_prenorm_gemm": _GemmSample(
        _hc_prenorm,
        {},
        _HC_SHAPES,
        {**_DENSE_SPACE, **_HC_SPACE},
        _HC_CUDA_SHAPES,
        {"m": (0, 1, 9, 300), "n": (24,), "k": (128, 576), "num_splits": (None, 2)},
    ),
}
