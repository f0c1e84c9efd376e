"""Every layout, in files and folders, to the bits of prepare_weights of the same tensors."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
import torch
from checkpoint_files import ENDS, PREFIX, layer, named, write
from helpers import E8M0, same_bits

import dgmoe_ops
from dgmoe_ops import export_weights, load_moe_layer, prepare_weights, recipes
from dgmoe_ops.checkpoints import LAYOUTS
from dgmoe_ops.checkpoints.source import Files

pytest.importorskip("safetensors")

CASES = [
    ("qwen3_moe", "bf16", "bf16"),
    ("mixtral", "bf16", "bf16"),
    ("fused", "bf16", "bf16"),
    ("gpt_oss_bf16", "bf16", "bf16"),
    ("qwen3_moe", "bf16", "fp8_block"),
    ("gpt_oss_bf16", "bf16", "fp8_block"),
    ("fused", "bf16", "mxfp8"),
    ("qwen3_moe", "bf16", "mxfp4"),
    ("deepseek_v3", "fp8_block", "fp8_block"),
    ("deepseek_v4", "fp8_block", "fp8_block"),
    ("minimax_m2", "fp8_block", "fp8_block"),
    ("fused_scale_inv", "fp8_block", "fp8_block"),
    ("weight_scale", "fp8_tensor", "fp8_block"),
    ("weight_scale_w123", "fp8_tensor", "fp8_block"),
    ("fused_scale_inv", "fp8_tensor", "fp8_block"),
    ("weight_scale", "mxfp8", "mxfp8"),
    ("weight_scale_w123", "mxfp8", "mxfp8"),
    ("deepseek_v4", "mxfp4", "mxfp4"),
    ("weight_packed", "mxfp4", "mxfp4"),
    ("weight_packed_w123", "mxfp4", "mxfp4"),
    ("fused_scale_inv", "mxfp4", "mxfp4"),
    ("gpt_oss", "mxfp4", "mxfp4"),
    ("deepseek_v4", "mxfp4", "fp8_block"),
    ("gpt_oss", "mxfp4", "fp8_block"),
]
NATIVE = {"bf16": "bf16", "fp8_tensor": "fp8_block"}
SIZES = [(3, 256, 128), (3, 288, 160), (1, 128, 320)]


def biases(experts: int, hidden: int, inter: int):
    g = torch.Generator().manual_seed(5)
    shapes = (experts, 2 * inter), (experts, hidden)
    return tuple(torch.randn(shape, generator=g).bfloat16() for shape in shapes)


def same_weights(a, b) -> bool:
    pairs = [*zip(a.tensors, b.tensors, strict=True)]
    pairs += [(a.w13_bias, b.w13_bias), (a.w2_bias, b.w2_bias)]
    return all(x is y or (same_bits(x, y) and x.stride() == y.stride()) for x, y in pairs)


def test_every_layout_has_a_case() -> None:
    assert set(ENDS) == set(LAYOUTS) == {case[0] for case in CASES}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("layout", "form", "recipe"), CASES)
def test_bits(tmp_path, device, layout, form, recipe, sizes) -> None:
    given = layer(form, *sizes)
    bias = biases(*sizes) if layout.startswith("gpt_oss") else None
    tensors = named(layout, *given, bias)
    tensors[f"{PREFIX}.gate.weight"] = torch.zeros(3)  # not of the experts
    tensors["model.layers.30.mlp.experts.0.other"] = torch.zeros(3)
    path = write(tmp_path, tensors)
    native = recipe == NATIVE.get(form, form)
    for target in ("cpu", "sm100"):
        found = load_moe_layer(
            path, PREFIX, recipe=None if native else recipe, target=target, device=device
        )
        moved = [tensor if tensor is None else tensor.to(device) for tensor in given]
        w13_bias, w2_bias = (None, None) if bias is None else (b.to(device) for b in bias)
        wanted = prepare_weights(*moved, recipe, target, w13_bias=w13_bias, w2_bias=w2_bias)
        assert (found.recipe, found.target) == (recipe, target)
        assert (found.hidden_size, found.intermediate_size) == sizes[1:]
        assert same_weights(found, wanted)
        back = export_weights(found)
        if native and form in ("bf16", "mxfp8", "mxfp4") or (form, target) == ("fp8_block", "cpu"):
            for one, other in zip(back, given, strict=True):
                assert one is other or same_bits(one.cpu(), other)


@pytest.mark.parametrize(
    ("layout", "form"),
    [("qwen3_moe", "bf16"), ("deepseek_v3", "fp8_block"), ("deepseek_v4", "fp8_block")],
)
def test_shared_experts_beside_routed_ones(tmp_path, layout, form) -> None:
    given, shared = layer("mxfp4", 2, 128, 64), layer(form, 1, 128, 256)
    tensors = named("deepseek_v4", *given)
    for name, tensor in named(layout, *shared).items():
        tensors[name.replace("experts.0.", "shared_experts.")] = tensor
    path = write(tmp_path, tensors)
    recipe = "bf16" if form == "bf16" else "fp8_block"
    assert same_weights(load_moe_layer(path, PREFIX), prepare_weights(*given, "mxfp4"))
    found = load_moe_layer(path, PREFIX, group="shared_experts")
    assert same_weights(found, prepare_weights(*shared, recipe))
    part = load_moe_layer(path, PREFIX, group="shared_experts", tp_rank=1, tp_size=2)
    assert same_bits(part.w2, found.w2[:, :, 128:].contiguous())
    with pytest.raises(
        ValueError, match=r"shared_experts must be those of .*, got shared_experts.bias too"
    ):
        tensors[f"{PREFIX}.shared_experts.bias"] = torch.zeros(1)
        load_moe_layer(write(tmp_path, tensors), PREFIX, group="shared_experts")


@pytest.mark.parametrize("kind", ["float", "e8m0", "bfloat16"])
def test_dtypes_of_scales(tmp_path, kind) -> None:
    """Qwen3's FP8 has bfloat16 scales, DeepSeek-V4's MXFP4 exponents as a dtype."""
    block = kind == "bfloat16"
    w13, s13, w2, s2 = layer("fp8_block" if block else "mxfp4", 2, 256, 128)
    change = {
        "float": lambda s: s.view(E8M0).float(),
        "e8m0": lambda s: s.view(E8M0),
        "bfloat16": lambda s: s.bfloat16(),
    }[kind]
    given = w13, change(s13), w2, change(s2)
    path = write(tmp_path, named("deepseek_v3" if block else "deepseek_v4", *given))
    wide = [s.float() if block else s for s in given[1::2]]
    for target in ("cpu", "sm100"):
        recipe = "fp8_block" if block else "mxfp4"
        wanted = prepare_weights(w13, wide[0], w2, wide[1], recipe, target)
        assert same_weights(load_moe_layer(path, PREFIX, target=target), wanted)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_a_tensor_of_any_rank_and_input_scales(tmp_path, shape) -> None:
    given = layer("fp8_tensor", 3, 128, 64)
    tensors = named("weight_scale", *given)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name] = tensors[name].view(shape)
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(0.5)
    path = write(tmp_path, tensors)
    assert same_weights(load_moe_layer(path, PREFIX), prepare_weights(*given))


@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100", "sm120"])
def test_the_default_recipe_follows_the_target(tmp_path, target) -> None:
    path = write(tmp_path, named("gpt_oss", *layer("mxfp4", 1, 64, 32), biases(1, 64, 32)))
    wanted = "mxfp4" if target in recipes.MXFP4.targets else "fp8_block"
    assert load_moe_layer(path, PREFIX, target=target).recipe == wanted


def test_shards_folders_and_prefixes(tmp_path) -> None:
    given = layer("fp8_block", 12, 128, 128)
    wanted = prepare_weights(*given)
    tensors = named("deepseek_v3", *given)
    folder = write(tmp_path / "shards", tensors, 4)
    assert same_weights(load_moe_layer(folder, PREFIX), wanted)
    assert same_weights(load_moe_layer(str(folder), PREFIX + "."), wanted)
    index = folder / "model.safetensors.index.json"
    assert same_weights(load_moe_layer(index, PREFIX), wanted)
    index.unlink()
    assert same_weights(load_moe_layer(folder, PREFIX), wanted)
    assert same_weights(load_moe_layer(write(tmp_path / "one", tensors).parent, PREFIX), wanted)
    bare = write(tmp_path / "bare", named("deepseek_v3", *given, prefix=""))
    assert same_weights(load_moe_layer(bare, ""), wanted)
    assert same_weights(load_moe_layer(bare, "", layout="deepseek_v3"), wanted)


def test_a_file_off_alignment(tmp_path) -> None:
    """Another writer may start tensors anywhere; vector loads must not meet them."""
    given = layer("bf16", 2, 72, 40)
    tensors = named("qwen3_moe", *given)
    header, data = {}, b""
    for name, tensor in tensors.items():
        data += b"\0"
        raw = tensor.view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[f"pad{len(data)}"] = {
            "dtype": "U8",
            "shape": [1],
            "data_offsets": [len(data) - 1, len(data)],
        }
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with Files(path) as files:
        assert all(files.read(name).data_ptr() % 2 == 0 for name in tensors)
        assert all(files.read(name, slice(1, 2)).data_ptr() % 2 == 0 for name in tensors)
    assert same_weights(load_moe_layer(path, PREFIX), prepare_weights(*given, "bf16"))
    found = load_moe_layer(path, PREFIX, recipe="fp8_block")
    assert same_weights(found, prepare_weights(*given, "fp8_block"))


def test_the_result_outlives_the_files_and_owns_its_memory(tmp_path) -> None:
    given = layer("bf16", 2, 128, 128)
    path = write(tmp_path, named("fused", *given))
    found = load_moe_layer(path, PREFIX)
    found.w13.fill_(1)  # the file is mapped privately, yet nothing of it may be shared
    assert same_weights(load_moe_layer(path, PREFIX), prepare_weights(*given, "bf16"))
    path.unlink()
    assert found.w13.untyped_storage().nbytes() == found.w13.nbytes


def test_a_bar_moves_once_for_each_expert(tmp_path, monkeypatch) -> None:
    moved = []

    @contextlib.contextmanager
    def steps(total, text, wanted):
        moved.append((total, wanted))
        yield lambda: moved.append(1)

    monkeypatch.setattr(dgmoe_ops._progress, "steps", steps)
    path = write(tmp_path, named("qwen3_moe", *layer("bf16", 3, 64, 32)))
    load_moe_layer(path, PREFIX, experts=(1, 3), progress=False)
    assert moved == [(4, False), *[1] * 4]
