"""Weight room: checkpoint weights and scales to what the GEMMs read."""

from __future__ import annotations

import torch

from ..layouts import WEIGHT_BLOCK, ceil_div
from ._registry import fake_of


def quant_block_fp8(
    weight: torch.Tensor, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to e4m3 with one fp32 scale a 128x128 block.

    Args:
        weight: (n, k) or (experts, n, k) bfloat16 or float32, any strides.
        round_scale: round scales up to powers of two, as UE8M0 targets need.

    Returns:
        q, the same shape in float8_e4m3fn, and scale (.., ceil(n / 128), ceil(k / 128)) float32,
        both contiguous.

    Raises:
        ValueError: the dtype or rank is not one of these.

    Source: DeepSeek-V3 technical report, section 3.3.2 (fine-grained quantisation).
    """
    return torch.ops.dgmoe.quant_block_fp8(weight, round_scale)


@fake_of("quant_block_fp8")
def _quant_block_fp8_fake(weight, round_scale=False):
    *batch, n, k = weight.shape
    scale_shape = (*batch, ceil_div(n, WEIGHT_BLOCK), ceil_div(k, WEIGHT_BLOCK))
    q = weight.new_empty(tuple(weight.shape), dtype=torch.float8_e4m3fn)
    return q, weight.new_empty(scale_shape, dtype=torch.float32)
