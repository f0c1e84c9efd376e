"""The recipes: what each is made of, the GEMM recipes for each K, and telling one from tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import E8M0, F8

from dgmoe_ops import recipes
from dgmoe_ops.backends import platforms
from dgmoe_ops.formats.recipes import infer_recipe, scale_recipes


def test_recipes_are_frozen() -> None:
    for recipe in recipes.RECIPES.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.group_size = 1
        assert hash(recipe) == hash(dataclasses.replace(recipe))


def test_scale_layouts_by_target() -> None:
    table = {
        name: [
            recipe.weight_scale_layout(target) if target in recipe.targets else None
            for target in recipes.TARGETS
        ]
        for name, recipe in recipes.RECIPES.items()
    }
    assert table == {
        "bf16": ["none"] * 4,
        "fp8_block": ["block_fp32", "block_fp32", "packed_ue8m0", "packed_ue8m0"],
        "mxfp8": ["packed_ue8m0", "packed_ue8m0", "packed_ue8m0", None],
        "mxfp4": ["packed_ue8m0"] * 4,
    }
    with pytest.raises(ValueError, match="cpu, sm90, sm100 for recipe mxfp8, got 'sm120'"):
        recipes.MXFP8.weight_scale_layout("sm120")
    for name, recipe in recipes.RECIPES.items():
        for platform in platforms.PLATFORMS:
            if platform.target:
                forms = platforms.scale_layouts(platform.archs[0], name)
                assert (platform.target in recipe.targets) == bool(forms)
                assert not forms or recipe.weight_scale_layout(platform.target) == forms[0]


def test_scale_recipes_of_each_k() -> None:
    # Of the layer: GEMM1 over hidden, GEMM2 over intermediate.
    assert scale_recipes("mxfp8", None, 4096, 32) == ((1, 32), (1, 32))
    assert scale_recipes("mxfp8", 32, 1536, 12) == ((1, 32), (1, 32))
    assert scale_recipes("mxfp8", 128, 4096, 8) == ((1, 128), (1, 32))
    assert scale_recipes("mxfp8", 128, 576, 2) == ((1, 128), (1, 32))
    assert scale_recipes("mxfp4", None, 4096) == ((1, 128), (1, 32))
    assert scale_recipes("mxfp4", 128, 4096, 8) == ((1, 128), (1, 32))
    for name in ("bf16", "fp8_block"):
        assert scale_recipes(name, None, 4096, 32) == (None, None)
    assert scale_recipes(recipes.MXFP8, None, 64, 1) == ((1, 32), (1, 32))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("mxfp8", None, 4096, 8), "activation_scale_width must be 32, one word for 128 of 4096"),
        (("mxfp8", 128, 1536, 12), "activation_scale_width must be 3, one word for 512 of 1536"),
        (("mxfp8", 64, 4096, 8), "activation_block_size must be 32 or 128 for recipe mxfp8"),
        (("mxfp4", 32, 4096, 8), "activation_block_size must be 128 for recipe mxfp4, got 32"),
        (("int3", None, 4096, 8), "recipe must be one of bf16, fp8_block, mxfp8, mxfp4"),
    ],
)
def test_scale_recipes_refuse(args, says) -> None:
    with pytest.raises(ValueError, match=says):
        scale_recipes(*args)


def zeros(shape, dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(dtype) if dtype in (F8, E8M0) else (
        torch.zeros(shape, dtype=dtype)
    )  # fmt: skip


E, N, K = 3, 512, 640


@pytest.mark.parametrize(
    ("dtype", "width", "scale_dtype", "scale_shape", "name"),
    [
        (torch.bfloat16, K, None, None, "bf16"),
        (torch.float32, K, None, None, "bf16"),
        (F8, K, torch.float32, (E, 4, 5), "fp8_block"),
        (F8, K, torch.uint8, (E, 4, 5), "fp8_block"),
        (F8, K, E8M0, (E, 4, 5), "fp8_block"),
        (F8, K, torch.float32, (), "fp8_block"),
        (F8, K, torch.float32, (E,), "fp8_block"),
        (F8, K, torch.float32, (E, 2), "fp8_block"),
        (F8, K, torch.int32, (E, N, 2), "fp8_block"),
        (F8, K, torch.uint8, (E, N, 20), "mxfp8"),
        (F8, K, E8M0, (E, N, 20), "mxfp8"),
        (F8, K, torch.float32, (E, N, 20), "mxfp8"),
        (F8, K, torch.int32, (E, N, 5), "mxfp8"),
        (torch.int8, K // 2, torch.uint8, (E, N, 20), "mxfp4"),
        (torch.uint8, K // 2, E8M0, (E, N, 20), "mxfp4"),
        (torch.int8, K // 2, torch.float32, (E, N, 20), "mxfp4"),
        (torch.int8, K // 2, torch.int32, (E, N, 5), "mxfp4"),
    ],
)
def test_inference(dtype, width, scale_dtype, scale_shape, name) -> None:
    scale = None if scale_dtype is None else zeros(scale_shape, scale_dtype)
    assert infer_recipe(zeros((E, N, width), dtype), scale).name == name


@pytest.mark.parametrize(
    ("weight", "scale", "says"),
    [
        (zeros((E, N, K), torch.float16), None, "w13 must be one of .*, got float16"),
        (zeros((N, K), F8), None, r"w13 must have shape \(experts, 2 \* intermediate, hidden\)"),
        (zeros((E, N, K), F8), None, "w13_scale must be given for quantised w13"),
        (zeros((E, N, K), torch.bfloat16), zeros((E,), torch.float32), "w13_scale must be given"),
        (
            zeros((E, N, K), F8),
            zeros((E, N, 5), torch.float32),
            r"w13_scale must be .*\(3, 4, 5\), or .*\(3, 512, 20\), for float8_e4m3fn w13"
            r" \(3, 512, 640\), got float32 \(3, 512, 5\)",
        ),
        (zeros((E, N, 96), F8), zeros((E, N, 1), torch.int32), "fits fp8_block and mxfp8"),
    ],
)
def test_inference_refuses(weight, scale, says) -> None:
    with pytest.raises(ValueError, match=says):
        infer_recipe(weight, scale)
