"""Sample arguments of every op.

Use `SAMPLES[op].tiny(device)`, `.edge(device)` or `.random(draw, device)` (hypothesis' draw).
Each call is (args, kwargs) for `torch.ops.dgmoe.<op>`. Where ops chain, inputs come from the
oracles. Padding rows are poisoned with NaN; whoever reads them shows it.
"""

from __future__ import annotations

from . import activation, combine, gemm, permute, route, scale, weights
from ._make import Sample, with_strides

SAMPLES: dict[str, Sample] = {
    **scale.SAMPLES,
    **weights.SAMPLES,
    **route.SAMPLES,
    **permute.SAMPLES,
    **gemm.SAMPLES,
    **activation.SAMPLES,
    **combine.SAMPLES,
}

__all__ = ["SAMPLES", "Sample", "with_strides"]
