"""A layer that lacks experts is refused, whatever took them, and cheaply: lost shards, numbers with
gaps, files short of what the caller or the model's configuration counts."""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc

import pytest
import torch
from checkpoint_files import PREFIX, layer, named, write
from helpers import same_bits

from dgmoe_ops import load_moe_layer, prepare_weights
from dgmoe_ops.checkpoints.model_config import KEYS, expert_count

pytest.importorskip("safetensors")

AT = f"{PREFIX}.experts"
SIZES = 6, 128, 64


def refused(path, *says: str, error=ValueError, **kwargs) -> None:
    with pytest.raises(error) as caught:
        load_moe_layer(path, PREFIX, **kwargs)
    for part in ("dgmoe_ops.load_moe_layer: ", *says):
        assert part in str(caught.value), str(caught.value)


def loads(path, given, **kwargs) -> None:
    found, wanted = load_moe_layer(path, PREFIX, **kwargs), prepare_weights(*given, "mxfp4")
    for one, other in zip(found.tensors, wanted.tensors, strict=True):
        assert same_bits(one, other)


def part(given, start: int, stop: int):
    return tuple(tensor[start:stop] for tensor in given)


@pytest.fixture
def given():
    return layer("mxfp4", *SIZES)


def halves(folder, given, numbers=("00001", "00002"), count="00002"):
    """Experts 0 to 3 in the first of two shards, 4 and 5 in the second, and no index."""
    files = []
    for number, (start, stop) in zip(numbers, ((0, 4), (4, 6)), strict=True):
        tensors = named("deepseek_v4", *part(given, start, stop))
        moved = {}
        for name, tensor in tensors.items():
            before, at, rest = name.partition(".experts.")
            e, _, stem = rest.partition(".")
            moved[f"{before}{at}{int(e) + start}.{stem}"] = tensor
        file = folder / f"model-{number}-of-{count}.safetensors"
        files.append(write(folder / number, moved).rename(file))
    return files


# ---- shards ----


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        (("00001", "00002"), "00002"),
        (("00000", "00001"), "00002"),
        (("1", "2"), "2"),
        (("00001", "00002"), "000002"),
    ],
)
def test_every_shard_is_needed(tmp_path, given, numbers, count) -> None:
    first, second = halves(tmp_path, given, numbers, count)
    loads(tmp_path, given)
    lost = tmp_path / "elsewhere.bin"
    for one in (second, first):
        # Without number 0 shards are counted from 1: of one that is left, more than one is lost.
        one.rename(lost)
        if numbers[0] == "00000" and one == first:
            says = ("without model-00002-of-00002.safetensors",)
        else:
            says = (f"without {one.name}",)
        refused(tmp_path, "must have every shard", *says, error=FileNotFoundError)
        refused(tmp_path, "must have every", error=FileNotFoundError, num_experts=4)
        refused(tmp_path, "must have every", error=FileNotFoundError, experts=(0, 4))
        lost.rename(one)
    loads(tmp_path, given)


def test_shards_beyond_their_count(tmp_path, given) -> None:
    halves(tmp_path, given, ("00001", "00003"), "00002")
    refused(tmp_path, "shards must be numbered 1 to 2", "got", "model-00003-of-00002")


def test_a_count_that_no_folder_holds(tmp_path, given) -> None:
    halves(tmp_path, given, ("00001", "00002"), "999999999999")
    says = "without model-00003-of-999999999999.safetensors"
    refused(tmp_path, says, error=FileNotFoundError)


def test_two_sets_of_shards(tmp_path, given) -> None:
    first, second = halves(tmp_path, given)
    second.rename(tmp_path / "other-00001-of-00002.safetensors")
    says = "without model-00002-of-00002.safetensors, other-00002-of-00002.safetensors"
    refused(tmp_path, says, error=FileNotFoundError)


def test_a_shard_alone_needs_to_be_told_what_it_has(tmp_path, given) -> None:
    first, second = halves(tmp_path, given)
    says = ("path must be all shards", "got one file without model-00002-of-00002.safetensors")
    refused(first, *says)
    refused(second, "got one file without model-00001-of-00002.safetensors")
    loads(first, part(given, 0, 4), experts=(0, 4))
    loads(first, part(given, 0, 4), num_experts=4)
    loads(second, part(given, 4, 6), experts=(4, 6))
    refused(first, "experts 0 to 5", f"without {AT}.4.w1.scale and 11 more", num_experts=6)
    (tmp_path / "config.json").write_text('{"n_routed_experts": 6}')
    refused(first, "experts 0 to 5", "as n_routed_experts in config.json says")
    refused(second, f"without {AT}.0.w1.scale and 23 more")
    one = write(tmp_path / "one", named("deepseek_v4", *given))
    loads(one.rename(tmp_path / "model-00001-of-00001.safetensors"), given)


def test_a_shard_with_a_tensor_of_all_experts(tmp_path, given) -> None:
    file = write(tmp_path, named("fused_scale_inv", *given))
    loads(file.rename(tmp_path / "model-00001-of-00002.safetensors"), given)
    shared = layer("bf16", 1, 128, 64)
    tensors = named("qwen3_moe", *shared)
    tensors = {name.replace("experts.0", "shared_expert"): t for name, t in tensors.items()}
    file = write(tmp_path / "shared", tensors)
    file = file.rename(file.with_name("model-00001-of-00002.safetensors"))
    found = load_moe_layer(file, PREFIX, group="shared_expert")
    assert same_bits(found.w13, prepare_weights(*shared, "bf16").w13)


# ---- numbers ----


@pytest.mark.parametrize("number", [7, 10_000_000, 10**17])
def test_numbers_with_gaps_cost_what_is_there(tmp_path, given, number) -> None:
    tensors = named("deepseek_v4", *given)
    for name in [name for name in tensors if ".experts.5." in name]:
        tensors[name.replace(".5.", f".{number}.")] = tensors.pop(name)
    path = write(tmp_path, tensors)
    tracemalloc.start()
    began = time.perf_counter()
    lacks = f"got one without {AT}.5.w1.scale and {6 * (number - 5) - 1} more"
    refused(path, f"have the {6 * (number + 1)} tensors of experts 0 to {number}", lacks)
    refused(path, f"tensors of experts 2 to {number}", lacks, experts=(2, number + 1))
    assert time.perf_counter() - began < 2.0
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    loads(path, part(given, 1, 5), experts=(1, 5))
    loads(path, part(given, 5, 6), experts=(number, number + 1))


@pytest.mark.parametrize("number", ["05", "5" * 5000, "٥", "-5", "5_0"])  # noqa: RUF001
def test_numbers_that_no_layout_writes(tmp_path, given, number) -> None:
    tensors = named("deepseek_v4", *given)
    tensors[f"{AT}.{number}.w1.weight"] = torch.ones(1)
    refused(write(tmp_path, tensors), "must be those of layout deepseek_v4", f"experts.{number}.w1")


# ---- counts ----


@pytest.mark.parametrize("layout", ["deepseek_v4", "fused_scale_inv"])
def test_the_number_of_experts_is_checked(tmp_path, given, layout) -> None:
    path = write(tmp_path, named(layout, *given))
    loads(path, given, num_experts=6)
    loads(path, part(given, 2, 5), num_experts=6, experts=(2, 5))
    for chosen in (None, (0, 3)):
        refused(path, "num_experts must be 6, as", "got 5", num_experts=5, experts=chosen)
    says = "num_experts must be 6, as the checkpoint has them, got 8"
    if layout == "deepseek_v4":
        says = (
            f"of experts 0 to 7 in layout deepseek_v4, as num_experts says, got one without {AT}.6."
        )
    refused(path, says, num_experts=8)
    refused(path, "got", num_experts=10**30)


def test_the_files_of_a_rank_know_only_their_experts(tmp_path, given) -> None:
    tensors = named("deepseek_v4", *given)
    few = {name: t for name, t in tensors.items() if name.split(".")[5] in ("2", "3")}
    path = write(tmp_path, few)
    (tmp_path / "config.json").write_text('{"num_experts": 6}')
    loads(path, part(given, 2, 4), experts=(2, 4), num_experts=6)
    loads(path, part(given, 2, 4), experts=(2, 4))


@pytest.mark.parametrize("layout", ["deepseek_v4", "fused_scale_inv"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("inner", [False, True])
def test_the_configuration_of_the_model_counts(tmp_path, given, layout, key, inner) -> None:
    path = write(tmp_path, named(layout, *given), 3)

    def says(number) -> None:
        config = {"hidden_size": 128, key: number}
        config = {key: 99, "text_config": config} if inner else config
        (tmp_path / "config.json").write_text(json.dumps(config))

    for number in (6, 5):  # a checkpoint may have spare ones
        says(number)
        loads(path, given)
        loads(path / "model.safetensors.index.json", given)
    says(8)
    refused(
        path, "8 experts" if layout != "deepseek_v4" else "experts 0 to 7", f"as {key} in config"
    )
    loads(path, given, num_experts=6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "8",
        '{"num_experts": null}',
        '{"num_experts": "8"}',
        '{"num_experts": 8.0}',
        '{"num_experts": true}',
        '{"num_experts": 0}',
        '{"num_experts": [8, 8]}',
        '{"num_experts": 8, "num_local_experts": 4}',
        '{"text_config": 3}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_configuration_that_counts_nothing(tmp_path, given, text) -> None:
    path = write(tmp_path, named("deepseek_v4", *given))
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert expert_count(tmp_path) is None
    loads(path, given)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert expert_count(tmp_path) is None
    loads(path, given)
    shutil.rmtree(tmp_path / "config.json")


def test_shared_experts_are_not_counted_by_the_configuration(tmp_path) -> None:
    shared = layer("bf16", 1, 128, 64)
    tensors = named("qwen3_moe", *shared)
    tensors = {name.replace("experts.0", "shared_experts"): t for name, t in tensors.items()}
    path = write(tmp_path, tensors)
    (tmp_path / "config.json").write_text('{"n_routed_experts": 256}')
    found = load_moe_layer(path, PREFIX, group="shared_experts", num_experts=1)
    assert same_bits(found.w13, prepare_weights(*shared, "bf16").w13)
    says = "num_experts must be 1, as the checkpoint has them, got 2"
    refused(path, says, group="shared_experts", num_experts=2)
