"""Beyond the result, loading takes the memory of one expert at most; all else stays in the file."""

from __future__ import annotations

import pytest
import torch
from checkpoint_files import PREFIX, layer, named, write
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dgmoe_ops import load_moe_layer, prepare_weights
from dgmoe_ops.checkpoints.source import Files

pytest.importorskip("safetensors")

EXPERTS, HIDDEN, INTER = 24, 256, 160


class Live(TorchDispatchMode):
    """The most bytes that were alive at once of all that ops allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return out
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._known[ref.cdata] = ref, storage.nbytes()
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return out


@pytest.mark.parametrize(
    ("layout", "form", "recipe", "target"),
    [
        ("qwen3_moe", "bf16", "bf16", "cpu"),
        ("gpt_oss_bf16", "bf16", "bf16", "cpu"),
        ("fused", "bf16", "fp8_block", "sm100"),
        ("qwen3_moe", "bf16", "mxfp4", "sm100"),
        ("deepseek_v3", "fp8_block", "fp8_block", "sm90"),
        ("deepseek_v3", "fp8_block", "fp8_block", "sm100"),
        ("weight_scale", "fp8_tensor", "fp8_block", "sm100"),
        ("weight_scale", "mxfp8", "mxfp8", "sm100"),
        ("deepseek_v4", "mxfp4", "mxfp4", "sm100"),
        ("deepseek_v4", "mxfp4", "fp8_block", "sm90"),
        ("gpt_oss", "mxfp4", "mxfp4", "sm100"),
    ],
)
def test_one_expert_beyond_the_result(tmp_path, layout, form, recipe, target) -> None:
    given = layer(form, EXPERTS, HIDDEN, INTER)
    tensors = named(layout, *given)
    if layout.startswith("gpt_oss"):
        for stem, width in (("gate_up_proj", 2 * INTER), ("down_proj", HIDDEN)):
            tensors[f"{PREFIX}.experts.{stem}_bias"] = torch.zeros(EXPERTS, width).bfloat16()
    path = write(tmp_path, tensors)
    with Live() as seen:
        found = load_moe_layer(path, PREFIX, recipe=recipe, target=target)
    expert = max(sum(t[0].nbytes for t in given if t is not None), found.nbytes // EXPERTS)
    assert found.nbytes <= seen.peak <= found.nbytes + expert


def test_the_count_sees_what_is_alive() -> None:
    with Live() as seen:
        kept = torch.zeros(1000, dtype=torch.uint8)
        torch.zeros(500, dtype=torch.uint8)
        torch.zeros(300, dtype=torch.uint8)
        assert seen.peak == 1500 and kept.nbytes == 1000
    w13, _, w2, _ = layer("bf16", 4, 128, 64)
    with Live() as seen:
        given = w13.clone(), w2.clone()
        made = prepare_weights(given[0], None, given[1], None, "fp8_block")
    assert seen.peak >= w13.nbytes + w2.nbytes + made.nbytes


def test_what_is_read_lies_in_the_mapped_file(tmp_path) -> None:
    given = layer("bf16", 2, 128, 64)
    path = write(tmp_path, named("fused", *given))
    with Files(path) as files:
        name = f"{PREFIX}.experts.gate_up_proj"
        one, again = files.read(name, 1), files.read(name, 1, slice(2, 3))
        assert again.data_ptr() == one[2:].data_ptr()
        assert torch.equal(one, given[0][1])
