"""Checkpoints that models' own classes save, through the layer, against those models' blocks."""

from __future__ import annotations

import pytest
import torch
from checkpoint_files import layer, write
from helpers import E8M0

import dgmoe_ops
from dgmoe_ops import export_weights, load_moe_layer, moe_block
from dgmoe_ops.layer.routing import Scoring
from dgmoe_ops.testing.layer import relative_error

pytest.importorskip("safetensors")

TOKENS, HIDDEN, INTER, EXPERTS, TOP_K = 23, 128, 72, 8, 2
PREFIX = "model.layers.0.mlp"
BF16, FP8 = 8e-3, 8e-2  # relative errors; e4m3 has three bits, for weights and activations


def normal(*shape, seed=0, size=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * size).bfloat16()


def model_of(name: str, cls: str, config_name: str, **sizes):
    """A model of one layer with random weights that bf16 holds, and its MoE block in fp64."""
    transformers = pytest.importorskip("transformers")
    models = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, config_name)(
        hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_experts_per_tok=TOP_K, **sizes,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = getattr(models, cls)(config).bfloat16().eval().requires_grad_(False)
    block = model.model.layers[0].mlp
    for i, (key, tensor) in enumerate([*block.named_parameters(), *block.named_buffers()]):
        if tensor.is_floating_point():
            size = 0.1 if "bias" in key or tensor.dim() < 3 else tensor.shape[-1] ** -0.5
            tensor.data.copy_(normal(*tensor.shape, seed=i, size=size))
    return model, block


def output_of(block, x) -> torch.Tensor:
    with torch.no_grad():
        y = block.double()(x.double()[None])
    return (y[0] if isinstance(y, tuple) else y)[0]


def saved(model, folder):
    model.save_pretrained(folder, max_shard_size="100KB")  # several shards and an index
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def test_qwen3_moe(tmp_path, device) -> None:
    model, block = model_of(
        "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", moe_intermediate_size=INTER,
        num_experts=EXPERTS, norm_topk_prob=True, head_dim=32,
    )  # fmt: skip
    x, gate = normal(TOKENS, HIDDEN, seed=3).to(device), block.gate.weight.to(device)
    folder = saved(model, tmp_path)
    for recipe, bound in ((None, BF16), ("fp8_block", FP8)):
        weights = load_moe_layer(folder, PREFIX, recipe=recipe, device=device)
        got = moe_block(x, gate, weights, top_k=TOP_K)
        assert relative_error(got.cpu(), output_of(block, x.cpu())) < bound
        block.bfloat16()


def test_mixtral(tmp_path, device) -> None:
    model, block = model_of(
        "mixtral", "MixtralForCausalLM", "MixtralConfig", intermediate_size=INTER,
        num_local_experts=EXPERTS, head_dim=32,
    )  # fmt: skip
    prefix = "model.layers.0.block_sparse_moe"
    weights = load_moe_layer(saved(model, tmp_path), prefix, device=device)
    x, gate = normal(TOKENS, HIDDEN, seed=3).to(device), block.gate.weight.to(device)
    got = moe_block(x, gate, weights, top_k=TOP_K)
    assert relative_error(got.cpu(), output_of(block, x.cpu())) < BF16


@pytest.mark.parametrize("fp8", [False, True])
def test_deepseek_v3(tmp_path, device, fp8) -> None:
    model, block = model_of(
        "deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", moe_intermediate_size=INTER,
        n_routed_experts=EXPERTS, n_group=4, topk_group=2, n_shared_experts=1,
        first_k_dense_replace=0, routed_scaling_factor=2.5, q_lora_rank=32, kv_lora_rank=32,
    )  # fmt: skip
    folder = saved(model, tmp_path / "saved")
    if fp8:  # quantise as DeepSeek's files have it, and let the model compute with those values
        tensors = {}
        for e in range(EXPERTS):
            gate, up = block.experts.gate_up_proj[e].chunk(2)
            for stem, weight in (("gate", gate), ("up", up), ("down", block.experts.down_proj[e])):
                q, scale = dgmoe_ops.ops.quant_block_fp8(weight)
                wide = scale.repeat_interleave(128, 0)[: q.shape[0]].repeat_interleave(128, 1)
                weight.copy_((q.float() * wide[:, : q.shape[1]]).to(weight.dtype))
                tensors[f"{PREFIX}.experts.{e}.{stem}_proj.weight"] = q
                tensors[f"{PREFIX}.experts.{e}.{stem}_proj.weight_scale_inv"] = scale
        folder = write(tmp_path / "fp8", tensors, 3)
    weights = load_moe_layer(folder, PREFIX, device=device)
    assert weights.recipe == ("fp8_block" if fp8 else "bf16")
    x = normal(TOKENS, HIDDEN, seed=3)
    shared = load_moe_layer(tmp_path / "saved", PREFIX, group="shared_experts", device=device)
    got = moe_block(
        x.to(device),
        block.gate.weight.to(device),
        weights,
        top_k=TOP_K,
        scoring=Scoring.SIGMOID,
        bias=block.gate.e_score_correction_bias.float().to(device),
        num_groups=4,
        topk_groups=2,
        routed_scaling_factor=2.5,
        shared=shared,
    )
    assert relative_error(got.cpu(), output_of(block, x)) < (FP8 if fp8 else BF16)


def gpt_oss(inter: int):
    return model_of(
        "gpt_oss", "GptOssForCausalLM", "GptOssConfig", intermediate_size=inter,
        num_local_experts=EXPERTS, layer_types=["full_attention"], head_dim=32,
    )  # fmt: skip


def gpt_oss_error(block, weights, device) -> float:
    x, router = normal(TOKENS, HIDDEN, seed=3), block.router
    got = moe_block(
        x.to(device),
        router.weight.bfloat16().to(device),
        weights,
        top_k=TOP_K,
        gate_bias=router.bias.to(device),
        activation="swigluoai",
    )
    return relative_error(got.cpu(), output_of(block, x))


@pytest.mark.parametrize("inter", [64, 72, 200])
def test_gpt_oss_in_bf16(tmp_path, device, inter) -> None:
    """In turns and transposed in the file; most of the sizes are no multiple of the padding."""
    model, block = gpt_oss(inter)
    weights = load_moe_layer(saved(model, tmp_path), PREFIX, device=device)
    assert weights.intermediate_size == inter and set(weights.biases) == {"w13_bias", "w2_bias"}
    assert gpt_oss_error(block, weights, device) < BF16


@pytest.mark.parametrize("inter", [96, 160])
def test_gpt_oss_in_mxfp4(tmp_path, device, inter) -> None:
    """The model computes with what transformers makes of the same blocks and scales."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    _, block = gpt_oss(inter)
    w13, s13, w2, s2 = layer("mxfp4", EXPERTS, HIDDEN, inter)
    s13, s2 = s13 % 13 + 116, s2 % 13 + 116  # no two neighbours alike, and exact in e4m3
    tensors = {}
    for stem, code, scale in (("gate_up_proj", w13, s13), ("down_proj", w2, s2)):
        blocks = code.view(torch.uint8).unflatten(-1, (-1, 16))
        tensors[f"{PREFIX}.experts.{stem}_blocks"] = blocks
        tensors[f"{PREFIX}.experts.{stem}_scales"] = scale
        bias = getattr(block.experts, f"{stem}_bias")
        tensors[f"{PREFIX}.experts.{stem}_bias"] = bias.clone()
        values = integration.convert_moe_packed_tensors(blocks, scale, dtype=torch.float32)
        getattr(block.experts, stem).data = values
    weights = load_moe_layer(write(tmp_path, tensors, 2), PREFIX, recipe="fp8_block", device=device)
    found, scale, down, scale2 = (tensor.cpu() for tensor in export_weights(weights))
    apart = block.experts.gate_up_proj.transpose(1, 2)  # (experts, 2 * inter, hidden), in turns
    for values, blocks, halves, wanted in (
        (found, scale, 2, torch.cat((apart[:, ::2], apart[:, 1::2]), 1)),
        (down, scale2, 1, block.experts.down_proj.transpose(1, 2)),
    ):
        experts, rows, columns = values.shape
        wide = blocks.repeat_interleave(128, 1).view(experts, halves, -1, blocks.shape[2])
        wide = wide[:, :, : rows // halves].reshape(experts, rows, -1)
        wide = wide.repeat_interleave(128, 2)[..., :columns]
        assert torch.equal(values.float() * wide, wanted.float())
    assert gpt_oss_error(block, weights, device) < FP8
    if "mxfp4" in dgmoe_ops.recipes.RECIPES:
        native = load_moe_layer(tmp_path, PREFIX, recipe="mxfp4", device=device)
        assert gpt_oss_error(block, native, device) < FP8
    exact = load_moe_layer(tmp_path, PREFIX, target="sm100", device=device)
    assert exact.recipe == "mxfp4" and torch.equal(
        export_weights(exact)[1].cpu().view(E8M0).float(),
        torch.cat((s13[:, ::2], s13[:, 1::2]), 1).view(E8M0).float(),
    )
