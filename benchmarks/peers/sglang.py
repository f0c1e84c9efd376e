"""sglang's FP8-block MoE layer for standard dispatch, called kernel by kernel as its runners call
them.

Three layers: DeepGEMM on a masked slab, DeepGEMM on contiguous segments, and the Triton kernels.
Each is a generator that stops after each of the five stages (see `benchmarks.layers`). Import this
module only through `load`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.inputs import LayerInputs, LayerWeights
from benchmarks.shapes import Shape
from dgmoe_ops.formats.layouts import contig_rows

_BLOCK = 128
_KERNELS = "sglang.kernels.ops"
_TRITON_UTILS = "sglang.srt.layers.moe.moe_runner.triton_utils"
# What sglang falls back to for block-quantised weights without a tuned file.
_UNTUNED = (64, 128, 32, 4, 3)


def triton_config(m: int, n: int, group: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": _BLOCK,
        "GROUP_SIZE_M": group,
        "num_warps": warps,
        "num_stages": stages,
    }


def sweep(tokens: int) -> list[dict[str, int]]:
    """List a few configurations worth a try: small row tiles for few tokens, large for many."""
    if tokens <= 128:
        tiles = [
            (16, 64, 1, 4, 4),
            (16, 128, 1, 4, 4),
            (16, 128, 1, 4, 3),
            (16, 128, 1, 8, 3),
            (16, 64, 32, 4, 4),
            (16, 128, 32, 4, 4),
        ]
    elif tokens <= 1024:
        tiles = [(16, 128, 1, 4, 4), (32, 128, 1, 4, 4), (64, 128, 1, 4, 4), (64, 128, 32, 8, 3)]
    else:
        tiles = [(64, 128, 1, 4, 4), (64, 128, 32, 8, 3), (128, 128, 32, 8, 3), (128, 64, 32, 4, 4)]
    return [triton_config(*tile) for tile in tiles]


@dataclass(frozen=True)
class Sglang:
    """The modules that the layers call."""

    deep_gemm: ModuleType
    layout: ModuleType
    moe: ModuleType
    pad: ModuleType
    token_quant: ModuleType
    group_quant: ModuleType
    fused: ModuleType
    align: ModuleType
    triton_language: ModuleType
    root: Path

    def masked(self, inputs: LayerInputs, weights: LayerWeights) -> Iterator[torch.Tensor | None]:
        """DeepGEMM on a slab of rows for each expert."""
        x, ids = inputs.hidden_states, inputs.topk_ids
        experts, hidden, _ = weights.w2.shape
        masked_m, expected_m, src2dst, rows, scale = self.moe.moe_ep_deepgemm_preprocess(
            ids, experts, x, ids.shape[1], [_BLOCK, _BLOCK]
        )
        scale = self.layout.get_mn_major_tma_aligned_tensor(scale)
        yield None
        slab = rows.shape[1]
        gate_up = x.new_empty((experts, slab, weights.w13.shape[1]))
        gemm = getattr(self.deep_gemm, "fp8_m_grouped_gemm_nt_masked", None)
        gemm = gemm or self.deep_gemm.m_grouped_fp8_gemm_nt_masked
        w13, w2 = (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)
        gemm((rows, scale), w13, gate_up, masked_m, expected_m)
        del rows, scale
        yield None
        act = self.group_quant.per_token_group_quant(
            gate_up,
            group_size=_BLOCK,
            scale_ue8m0=False,
            fuse_silu_and_mul=True,
            masked_m=masked_m,
            column_major_scales=True,
        )
        del gate_up
        yield None
        down = x.new_empty((experts, slab, hidden))
        gemm(act, w2, down, masked_m, expected_m)
        del act
        yield None
        yield self._reorder(inputs, down, src2dst)

    def contig(self, inputs: LayerInputs, weights: LayerWeights) -> Iterator[torch.Tensor | None]:
        """DeepGEMM on one segment for each expert, padded to 128 rows."""
        x, ids = inputs.hidden_states, inputs.topk_ids
        experts, hidden, _ = weights.w2.shape
        total = contig_rows(ids.numel(), experts, _BLOCK)
        valid, _ = self.moe.fused_moe_dispatch_index(ids, experts, 1)
        padded = self.pad.pad_expert_counts(valid, _BLOCK, total)
        q, q_scale = self.token_quant.sglang_per_token_group_quant_fp8(x, _BLOCK)
        rows = q.new_empty((total, hidden))
        scale = x.new_zeros((total, hidden // _BLOCK), dtype=torch.float32)
        m_indices = ids.new_empty((total,), dtype=torch.int32)
        src2dst = torch.empty_like(ids, dtype=torch.int32)
        starts = torch.empty_like(padded)
        self.moe.ep_scatter(
            q,
            q_scale,
            ids,
            padded,
            valid,
            starts,
            rows,
            scale,
            m_indices,
            src2dst,
            quant_block_size=_BLOCK,
            expert_alignment=_BLOCK,
        )
        scale = self.moe.tma_align_input_scale(scale)
        del q, q_scale
        yield None
        gemm = self.deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        w13, w2 = (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)
        gate_up = x.new_empty((total, weights.w13.shape[1]))
        gemm((rows, scale), w13, gate_up, m_indices)
        del rows, scale
        yield None
        act, act_scale = self.group_quant.per_token_group_quant(
            gate_up, group_size=_BLOCK, scale_ue8m0=False, fuse_silu_and_mul=True
        )
        act_scale = self.moe.tma_align_input_scale(act_scale)
        del gate_up
        yield None
        down = x.new_empty((total, hidden))
        gemm((act, act_scale), w2, down, m_indices)
        del act, act_scale
        yield None
        yield self._reorder(inputs, down, src2dst)

    def triton(
        self, inputs: LayerInputs, weights: LayerWeights, config: dict[str, int]
    ) -> Iterator[torch.Tensor | None]:
        """Triton kernels that read the tokens in place; quantising them counts as part of each
        GEMM.
        """
        x, ids = inputs.hidden_states, inputs.topk_ids
        tokens, top_k = ids.shape
        experts, hidden, inter = weights.w2.shape
        order, block_experts, padded = self.align.moe_align_block_size(
            ids, config["BLOCK_SIZE_M"], experts
        )
        yield None

        def gemm(a, b, b_scale, out, weigh: bool, rows_per_token: int) -> None:
            self.fused.invoke_fused_moe_kernel(
                a,
                b,
                None,
                out,
                None,
                b_scale,
                None,
                inputs.topk_weights,
                ids,
                order,
                block_experts,
                padded,
                weigh,
                rows_per_token,
                config,
                compute_type=self.triton_language.bfloat16,
                use_fp8_w8a8=True,
                use_int8_w8a8=False,
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                per_channel_quant=False,
                block_shape=[_BLOCK, _BLOCK],
            )

        gate_up = x.new_empty((tokens * top_k, 2 * inter))
        gemm(x, weights.w13, weights.w13_scale, gate_up, False, top_k)
        yield None
        act = x.new_empty((tokens * top_k, inter))
        self.fused.act_and_mul_triton(gate_up, act, config, ids)
        yield None
        down = x.new_empty((tokens, top_k, hidden))
        gemm(act, weights.w2, weights.w2_scale, down, True, 1)
        yield None
        out = torch.empty_like(x)
        self.fused.moe_sum_reduce_triton(down, out, 1.0)
        yield out

    def sweep(self, tokens: int) -> list[dict[str, int]]:
        return sweep(tokens)

    def shipped_config(self, shape: Shape, tokens: int, device_name: str) -> dict[str, int]:
        """Find the tuned configuration that comes with sglang, or what it falls back to."""
        name = (
            f"E={shape.experts},N={shape.intermediate},device_name={device_name.replace(' ', '_')},"
            f"dtype=fp8_w8a8,block_shape=[{_BLOCK}, {_BLOCK}].json"
        )
        files = sorted(file for file in self.root.glob("configs/*/*.json") if file.name == name)
        if not files:
            return triton_config(*_UNTUNED)
        table = json.loads(files[-1].read_text())
        tuned = {int(count): config for count, config in table.items() if count.isdigit()}
        return tuned[min(tuned, key=lambda count: abs(count - tokens))]

    def _reorder(self, inputs: LayerInputs, down: torch.Tensor, src2dst: torch.Tensor):
        out = torch.empty_like(inputs.hidden_states)
        tokens, top_k = inputs.topk_ids.shape
        self.moe.post_reorder_deepgemm(
            down,
            out,
            src2dst,
            inputs.topk_ids,
            inputs.topk_weights,
            top_k,
            tokens,
            out.shape[1],
            1.0,
        )
        return out


def load() -> Sglang:
    """Import sglang's kernels and DeepGEMM; raises ImportError where one of them is missing."""
    module = importlib.import_module
    align = module(f"{_TRITON_UTILS}.moe_align_block_size")
    compiled_align = module(f"{_KERNELS}.moe.moe_align").moe_align_block_size
    if importlib.util.find_spec("sgl_kernel") is None:
        # The ahead-of-time kernel is a wheel of its own; the one compiled on demand takes one flag
        # fewer.
        align.sgl_moe_align_block_size = lambda *args: compiled_align(*args[:8])
    return Sglang(
        deep_gemm=module("deep_gemm"),
        layout=module("deep_gemm.utils.layout"),
        moe=module(f"{_KERNELS}.moe.ep_moe_kernels"),
        pad=module(f"{_KERNELS}.moe.triton_pad_expert_counts"),
        token_quant=module(f"{_KERNELS}.quantization.fp8_kernel"),
        group_quant=module(f"{_KERNELS}.quantization.per_token_group_quant"),
        fused=module(f"{_KERNELS}.moe.fused_moe_triton_kernels"),
        align=align,
        triton_language=module("triton.language"),
        root=Path(align.__file__).parent,
    )
