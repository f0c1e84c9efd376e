"""Which tile a grouped GEMM takes, by what is known before it runs."""

from __future__ import annotations

from typing import NamedTuple

from ...formats.gemm import GroupedGemmSpec


class Config(NamedTuple):
    """How it is tiled."""

    block_m: int  #: tokens
    block_n: int  #: rows of a weight
    stages: int
    warps: int


#: (most rows an expert, config for MXFP4, config for MXFP8), measured on an H200 by
#: `benchmarks/tune_triton.py`
_TILES = (
    (20, Config(16, 128, 3, 4), Config(16, 64, 5, 4)),
    (32, Config(32, 128, 4, 4), Config(32, 128, 4, 4)),
    (160, Config(64, 128, 3, 4), Config(64, 128, 3, 4)),
    (float("inf"), Config(128, 64, 3, 4), Config(128, 64, 3, 4)),
)
_FEW_COLUMNS = 1024  # of k: a deep pipeline is not worth its start


def choose(spec: GroupedGemmSpec, rows: float) -> Config:
    """The tile for a grouped GEMM whose experts have about `rows` rows."""
    fp4, fp8 = next((fp4, fp8) for most, fp4, fp8 in _TILES if rows <= most)
    config = fp4 if spec.fp4 else fp8
    if config.stages > 3 and spec.k < _FEW_COLUMNS:
        config = config._replace(stages=3)
    return config
