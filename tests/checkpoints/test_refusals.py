"""What a checkpoint can have wrong: errors name the tensor, what it must be and what it is."""

from __future__ import annotations

import json
import re
import sys
from inspect import signature

import pytest
import torch
from checkpoint_files import PREFIX, layer, named, write
from helpers import F8

from dgmoe_ops import load_moe_layer, prepare_weights
from dgmoe_ops.checkpoints import LAYOUTS

pytest.importorskip("safetensors")

AT = f"{PREFIX}.experts"


def refused(path, *says: str, error=ValueError, **kwargs) -> str:
    with pytest.raises(error) as caught:
        load_moe_layer(path, kwargs.pop("prefix", PREFIX), **kwargs)
    message = str(caught.value)
    for part in says:
        assert part in message, message
    return message


def spoiled(tmp_path, layout: str, form: str, changes: dict, sizes=(2, 256, 128)):
    """A checkpoint of which some tensors, by the ends of their names, are changed, added or, for
    None, gone."""
    bias = None
    if layout.startswith("gpt_oss"):
        bias = torch.zeros(sizes[0], 2 * sizes[2]), torch.zeros(sizes[:2])
    tensors = named(layout, *layer(form, *sizes), bias)
    for end, change in changes.items():
        name = f"{AT}.{end}"
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name]) if callable(change) else change
    return write(tmp_path, tensors)


@pytest.mark.parametrize(
    ("layout", "form", "changes", "says"),
    [
        (  # a scale grid that does not match, of gate, of down, of a fused tensor
            "deepseek_v3", "fp8_block", {"1.gate_proj.weight_scale_inv": torch.ones(1, 3)},
            ("1.gate_proj.weight_scale_inv must have shape (1, 2), as",
             "gate_proj.weight is (128, 256)", "got (1, 3)"),
        ),
        (
            "deepseek_v4", "mxfp4", {"0.w2.scale": lambda s: s[:, :3]},
            ("experts.0.w2.scale must have shape (256, 4), as", "0.w2.weight is (256, 64)",
             "got (256, 3)"),
        ),
        (
            "gpt_oss", "mxfp4", {"gate_up_proj_scales": lambda s: s[:, :-2]},
            ("gate_up_proj_scales must have shape (2, 256, 8)", "got (2, 254, 8)"),
        ),
        (  # blocks of another size, as DeepSeek-V4.1 has them
            "deepseek_v4", "fp8_block", {"0.w1.scale": torch.ones(4, 8)},
            ("experts.0.w1.scale must have shape (1, 2)", "got (4, 8)"),
        ),
        (  # a scale a row
            "weight_scale", "fp8_tensor", {"0.gate_proj.weight_scale": torch.ones(128, 1)},
            ("experts.0.gate_proj.weight_scale must be float32/bfloat16 of shape ()", "or uint8/",
             "(128, 8)", "got float32 (128, 1)"),
        ),
        (  # one expert unlike the others
            "weight_scale", "fp8_tensor", {"1.up_proj.weight_scale": torch.ones(128, 8)},
            ("experts.1.up_proj.weight_scale must have shape () or (1,) or (1, 1)", "got (128, 8)"),
        ),
        (
            "qwen3_moe", "bf16", {"1.down_proj.weight": lambda w: w[:, :-1]},
            ("experts.1.down_proj.weight must have shape (256, 128), as",
             "0.gate_proj.weight is bfloat16 (128, 256)", "got (256, 127)"),
        ),
        (
            "qwen3_moe", "bf16", {"1.up_proj.weight": lambda w: w.to(F8)},
            ("experts.1.up_proj.weight must be bfloat16 or float32", "got float8_e4m3fn"),
        ),
        (
            "qwen3_moe", "bf16", {"0.gate_proj.weight": lambda w: w.half()},
            ("experts.0.gate_proj.weight must be bfloat16 or float32 in layout qwen3_moe",
             "got float16"),
        ),
        (  # an odd row of FP4
            "deepseek_v4", "mxfp4",
            {"0.w1.weight": lambda w: w[:-1], "0.w3.weight": lambda w: w[:-1]},
            ("experts.0.w1.weight must have an intermediate size in multiples of 2, of which",
             "0.w2.weight packs its columns, got 127"),
        ),
        (
            "fused", "bf16", {"gate_up_proj": lambda w: w[:, :-1]},
            ("gate_up_proj must have as many rows of gate as of up, got (2, 255, 256)",),
        ),
        (
            "fused", "bf16", {"down_proj": lambda w: w[0]},
            ("down_proj must have shape (2, 256, 128)", "got (256, 128)"),
        ),
        (
            "gpt_oss", "mxfp4", {"gate_up_proj_blocks": lambda w: w.flatten(-2)},
            ("gate_up_proj_blocks must have 4 dimensions in layout gpt_oss, got (2, 256, 128)",),
        ),
        (
            "gpt_oss", "mxfp4", {"gate_up_proj_bias": lambda b: b[:, :-1]},
            ("gate_up_proj_bias must have shape (2, 256)", "got (2, 255)"),
        ),
        (
            "gpt_oss", "mxfp4", {"down_proj_bias": lambda b: b.half()},
            ("down_proj_bias must be float32 or bfloat16", "got float16"),
        ),
        (  # prepared weights, saved as they are
            "weight_scale", "mxfp8", {"1.up_proj.weight_scale": torch.ones(128, 2).int()},
            ("experts.1.up_proj.weight_scale must be uint8 or", "int32 scales are packed for a",
             "export_weights", "got int32"),
        ),
        (
            "deepseek_v4", "mxfp4", {"1.w3.scale": torch.full((128, 8), 3.0)},
            ("experts.1.w3.scale must hold powers of two", "got 3.0 at [0, 0]"),
        ),
        # missing and extra tensors
        (
            "deepseek_v3", "fp8_block", {"1.up_proj.weight_scale_inv": None},
            ("the checkpoint must have the 12 tensors of experts 0 to 1 in layout deepseek_v3",
             "without model.layers.3.mlp.experts.1.up_proj.weight_scale_inv"),
        ),
        (
            "gpt_oss", "mxfp4", {"down_proj_bias": None},
            ("fit a layout", "got experts.down_proj_blocks",
             "(gpt_oss lacks experts.down_proj_bias)"),
        ),
        (
            "deepseek_v3", "fp8_block", {"1.gate_proj.zero_point": torch.ones(1)},
            ("the tensors below model.layers.3.mlp.experts must be those of layout deepseek_v3",
             "got experts.1.gate_proj.zero_point too"),
        ),
        (  # NVFP4 has a second scale
            "weight_packed", "mxfp4", {"0.up_proj.weight_scale_2": torch.ones(1)},
            ("must be those of layout weight_packed", "experts.0.up_proj.weight_scale_2"),
        ),
    ],
)  # fmt: skip
def test_tensors(tmp_path, layout, form, changes, says) -> None:
    message = refused(spoiled(tmp_path, layout, form, changes), *says)
    assert re.match(r"dgmoe_ops\.load_moe_layer: .+ must .+, got ", message), message


SCALED = [
    ("deepseek_v3", "fp8_block"),
    ("fused_scale_inv", "fp8_block"),
    ("weight_scale", "fp8_tensor"),
    ("fused_scale_inv", "fp8_tensor"),
    ("weight_scale_w123", "mxfp8"),
    ("deepseek_v4", "mxfp4"),
    ("fused_scale_inv", "mxfp4"),
    ("gpt_oss", "mxfp4"),
]


@pytest.mark.parametrize(("layout", "form"), SCALED)
def test_what_is_no_scale_is_named_where_the_file_has_it(tmp_path, layout, form) -> None:
    bias = (torch.zeros(2, 256), torch.zeros(2, 256)) if layout == "gpt_oss" else None
    tensors = named(layout, *layer(form, 2, 256, 128), bias)
    scales = [name for name in tensors if "scale" in name]
    assert len(scales) in (2, 6)
    for i, name in enumerate(scales):
        spoilt = tensors[name].clone()
        at = tuple(size - 1 for size in spoilt.shape)
        value = 255 if spoilt.element_size() == 1 else -1.0
        (spoilt.view(torch.uint8) if value == 255 else spoilt)[at] = value
        path = write(tmp_path / str(i), {**tensors, name: spoilt})
        message = refused(path, f"dgmoe_ops.load_moe_layer: {name} must hold ", f"got {value}")
        if form != "fp8_tensor":
            assert message.endswith(f" at {list(at)}"), message


@pytest.mark.parametrize(("layout", "name", "at"), [
    ("deepseek_v4", "1.w1.scale", (100, 3)),
    ("deepseek_v4", "1.w2.scale", (7, 3)),
    ("fused_scale_inv", "gate_up_proj_scale_inv", (1, 228, 3)),
    ("fused_scale_inv", "down_proj_scale_inv", (1, 7, 3)),
    ("gpt_oss", "gate_up_proj_scales", (1, 201, 3)),
    ("gpt_oss", "down_proj_scales", (1, 7, 3)),
])  # fmt: skip
def test_a_part_names_the_place_in_the_whole(tmp_path, layout, name, at) -> None:
    def spoil(scale):
        scale[at] = 255
        return scale

    path = spoiled(tmp_path, layout, "mxfp4", {name: spoil})
    part = {"experts": (1, 2), "tp_rank": 1, "tp_size": 2}
    refused(path, f"{name} must hold no exponent byte 255", f"got 255 at {list(at)}", **part)
    load_moe_layer(path, PREFIX, experts=(0, 1))
    load_moe_layer(path, PREFIX, experts=(1, 2), tp_rank=0, tp_size=2)


def test_unknown_layouts_list_what_is_there_and_what_is_known(tmp_path) -> None:
    path = write(tmp_path, {f"{AT}.0.kernel": torch.ones(2), f"{AT}.1.kernel": torch.ones(2)})
    message = refused(path, "got experts.{}.kernel")
    for name, known in LAYOUTS.items():
        assert f"{name} ({known.models})" in message
    refused(path, "layout must be one of qwen3_moe, ", "got 'gguf'", layout="gguf")
    says = "layout mixtral must have experts.{}.w1.weight, experts.{}.w2.weight"
    refused(path, says, "got experts.{}.kernel", layout="mixtral")


def test_prefixes(tmp_path) -> None:
    path = spoiled(tmp_path, "fused", "bf16", {})
    refused(
        path,
        "prefix must have tensors named model.layers.4.mlp.experts...",
        "got 'model.layers.4.mlp'; such tensors are below model.layers.3.mlp",
        prefix="model.layers.4.mlp",
    )
    refused(path, "are below model.layers.3.mlp", prefix=AT)
    says = "prefix must have tensors named model.layers.3.mlp.shared_experts..."
    refused(path, says, "got 'model.layers.3.mlp'", group="shared_experts")


@pytest.mark.parametrize("layout", ["fused", "qwen3_moe"])
def test_ranges(tmp_path, layout) -> None:
    path = spoiled(tmp_path, layout, "bf16", {})
    for experts in ((0, 3), (-1, 1), (2, 2), (2, 3), (1, 0)):
        says = "experts must be (start, stop), at least one of the 2 experts of the checkpoint"
        refused(path, says, f"got {experts}", experts=experts)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        says = f"tp_rank must be at least 0 and below tp_size, {size}, got {rank}"
        refused(path, says, tp_rank=rank, tp_size=size)
    refused(path, "tp_size must divide the intermediate size, 128, got 3", tp_size=3)


def test_recipes_and_targets(tmp_path) -> None:
    path = spoiled(tmp_path, "deepseek_v3", "fp8_block", {})
    says = "recipe mxfp8 must take one of: bfloat16 or float32; float8_e4m3fn with a UE8M0 scale"
    refused(path, says, "got a checkpoint of float8_e4m3fn with a scale a 128x128", recipe="mxfp8")
    refused(path, "recipe must be one of", "got 'int4'", recipe="int4")
    refused(path, "target must be one of cpu, sm90", "got 'sm80'", target="sm80")
    made = load_moe_layer(path, PREFIX)
    with pytest.raises(
        ValueError, match="w13 must be prepared for recipe fp8_block and target sm1"
    ):
        prepare_weights(made, recipe="fp8_block", target="sm100")


def test_files(tmp_path) -> None:
    refused(tmp_path / "none", "no file or folder", error=FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "path must hold safetensors files or their index, got")
    other = tmp_path / "model.bin"
    other.write_bytes(b"\x80\x02 a pickle, say")
    refused(other, "model.bin must be safetensors, got")
    tensors = named("qwen3_moe", *layer("bf16", 4, 64, 32))
    folder = write(tmp_path / "shards", tensors, 3)
    shard, index = "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
    (folder / shard).rename(folder / "elsewhere.safetensors")
    refused(folder, ".weight must be in", shard, "no such file", error=FileNotFoundError)
    (folder / "elsewhere.safetensors").rename(folder / shard)
    text = json.loads(index.read_text())
    text["weight_map"][f"{AT}.0.gate_proj.weight"] = shard
    index.write_text(json.dumps(text))
    refused(folder, f"{AT}.0.gate_proj.weight must be in", shard, "as the index says, got")
    index.write_text("{}")
    refused(folder, "model.safetensors.index.json must be JSON with a weight_map")
    index.unlink()
    (folder / "copy.safetensors").write_bytes((folder / shard).read_bytes())
    refused(folder, "a tensor must be in one file, but", "too")


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "..\\outside.safetensors",
        "sub\\..\\..\\outside.safetensors",
        "/etc/passwd",
        "//host/share/x",
        "\\\\host\\share\\x",
        "\\x.safetensors",
        "C:\\x.safetensors",
        "c:x.safetensors",
        "..",
        ".",
        "./",
        "",
        "sub/",
        "sub/.",
        "x\0y",
    ],
)
def test_an_index_stays_in_its_folder(tmp_path, file) -> None:
    tensors = named("qwen3_moe", *layer("bf16", 2, 64, 32))
    folder = write(tmp_path / "inside", tensors, 2)
    write(tmp_path, tensors).rename(tmp_path / "outside.safetensors")
    (folder / "sub").mkdir()
    name = f"{AT}.1.down_proj.weight"
    index = folder / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    text["weight_map"][name] = file
    index.write_text(json.dumps(text))
    says = f"weight_map[{name!r}] of {index} must name a file in the folder of the index or below"
    refused(folder, says, f"got {file!r}")
    refused(index, says, experts=(0, 1))  # though nothing of that file is asked for


@pytest.mark.parametrize("value", [None, 3, ["model.safetensors"], {}, True])
def test_entries_of_an_index_are_names(tmp_path, value) -> None:
    folder = write(tmp_path, named("qwen3_moe", *layer("bf16", 2, 64, 32)), 2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": value}}))
    refused(folder, "weight_map['a']", "must be the name of a file", f"got {value!r}")
    index.write_text(json.dumps({"weight_map": value}))
    if value != {}:
        refused(folder, "must be JSON with a weight_map", f"type {type(value).__name__}")


def test_files_below_the_folder_of_an_index(tmp_path) -> None:
    given = layer("bf16", 2, 64, 32)
    tensors = named("qwen3_moe", *given)
    write(tmp_path / "sub", tensors)
    text = {"weight_map": dict.fromkeys(tensors, "./sub/model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(text))
    wanted = prepare_weights(*given, "bf16")
    assert torch.equal(load_moe_layer(tmp_path, PREFIX).w13, wanted.w13)


def test_folders_in_place_of_files(tmp_path) -> None:
    tensors = named("qwen3_moe", *layer("bf16", 2, 64, 32))
    folder = write(tmp_path / "a", tensors, 2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.mkdir()
    refused(folder, "weight_map[", "must name a file", f"got {shard.name!r}, which is a folder")
    index = folder / "model.safetensors.index.json"
    index.unlink()
    refused(folder, f"{shard} must be a safetensors file, got a folder")
    refused(shard, "path must hold safetensors files or their index")
    index.mkdir()
    refused(folder, f"{index} must be a file, got a folder")
    (tmp_path / "b" / "x.safetensors").mkdir(parents=True)
    refused(tmp_path / "b", "x.safetensors must be a safetensors file, got a folder")


@pytest.mark.parametrize(
    ("arg", "value", "says"),
    [
        ("path", None, "path must be a string or a path, got None of type NoneType"),
        ("path", 3, "path must be a string or a path, got 3 of type int"),
        ("path", b"model", "path must be a string or a path, got b'model'"),
        ("path", ["a"], "path must be a string or a path"),
        ("path", "", "path must name a file or a folder, got ''"),
        ("prefix", None, "prefix must be a string, got None of type NoneType"),
        ("prefix", 3, "prefix must be a string, got 3 of type int"),
        ("prefix", b"model", "prefix must be a string"),
        ("group", None, "group must be a string, got None"),
        ("group", "", "prefix must have tensors named"),
        ("layout", 3, "layout must be a string or None, got 3 of type int"),
        ("layout", ["mixtral"], "layout must be a string or None"),
        ("recipe", 3, "recipe must be a string or None, got 3"),
        ("recipe", ["bf16"], "recipe must be a string or None"),
        ("target", 90, "target must be a string or None, got 90"),
        ("target", {"sm90"}, "target must be a string or None"),
        ("device", None, "device must be a CPU or a CUDA device, got None"),
        ("device", "nonsense", "device must be a CPU or a CUDA device, got 'nonsense'"),
        ("device", "meta", "device must be a CPU or a CUDA device, got 'meta'"),
        ("device", 1.5, "device must be a CPU or a CUDA device, got 1.5"),
        ("experts", (0,), "experts must be (start, stop), two ints, or None, got (0,) of type"),
        ("experts", (), "experts must be (start, stop), two ints, or None, got ()"),
        ("experts", (0, 1, 2), "experts must be (start, stop), two ints, or None"),
        ("experts", 2, "experts must be (start, stop), two ints, or None, got 2"),
        ("experts", "01", "experts must be (start, stop), two ints, or None"),
        ("experts", (0, 1.0), "experts must be (start, stop), two ints, or None"),
        ("experts", (False, True), "experts must be (start, stop), two ints, or None"),
        ("experts", (None, 2), "experts must be (start, stop), two ints, or None"),
        ("experts", (0, 10**30), "experts must be (start, stop), at least one of the 2 experts"),
        ("num_experts", "2", "num_experts must be an int or None, got '2' of type str"),
        ("num_experts", 2.0, "num_experts must be an int or None, got 2.0"),
        ("num_experts", True, "num_experts must be an int or None, got True"),
        ("num_experts", 0, "num_experts must be at least 1, got 0"),
        ("tp_rank", None, "tp_rank must be an int, got None"),
        ("tp_rank", "0", "tp_rank must be an int, got '0'"),
        ("tp_rank", False, "tp_rank must be an int, got False"),
        ("tp_size", None, "tp_size must be an int, got None"),
        ("tp_size", 1.0, "tp_size must be an int, got 1.0"),
        ("tp_size", 10**30, "tp_size must divide the intermediate size"),
        ("search", None, "search must be True or False, got None"),
        ("search", "no", "search must be True or False, got 'no'"),
        ("progress", None, "progress must be True or False, got None"),
        ("progress", 1, "progress must be True or False, got 1"),
    ],
)  # fmt: skip
def test_arguments(tmp_path, arg, value, says) -> None:
    given = {"path": spoiled(tmp_path, "qwen3_moe", "bf16", {}), "prefix": PREFIX, arg: value}
    path = given.pop("path")
    with pytest.raises(ValueError) as caught:
        load_moe_layer(path, given.pop("prefix"), **given)
    assert str(caught.value).startswith("dgmoe_ops.load_moe_layer: " + says), caught.value


def test_every_argument_is_checked() -> None:
    (mark,) = (m for m in test_arguments.pytestmark if m.name == "parametrize")
    assert {case[0] for case in mark.args[1]} == set(signature(load_moe_layer).parameters)


def test_a_gpu_that_is_not_there(tmp_path) -> None:
    path = spoiled(tmp_path, "qwen3_moe", "bf16", {})
    count = torch.cuda.device_count()
    says = f"device must be there, got cuda:{count}, and torch"
    refused(path, says, f"sees {count} GPUs", error=RuntimeError, device=f"cuda:{count}")


@pytest.mark.parametrize("shape", [(0, 256), (128, 0)])
def test_empty_weights(tmp_path, shape) -> None:
    tensors = {f"{AT}.0.{stem}.weight": torch.ones(shape) for stem in ("gate_proj", "up_proj")}
    tensors[f"{AT}.0.down_proj.weight"] = torch.ones(shape[::-1])
    refused(write(tmp_path, tensors), f"must have no empty dimension, got {shape}")


def test_without_safetensors(tmp_path, monkeypatch) -> None:
    path = spoiled(tmp_path, "fused", "bf16", {})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(path, 'pip install "safetensors>=0.6"', error=ModuleNotFoundError)
