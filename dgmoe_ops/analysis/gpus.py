"""Datasheet values of the GPUs that `plan` can be asked about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU on paper.

    Attributes:
        name: what `--gpu` takes.
        arch: compute capability major * 10 + minor.
        memory_gib: total memory as PyTorch reports it, below what the datasheet calls GB.
        hbm_bytes_per_s: peak memory rate.
        fp8_flops, bf16_flops: peak dense rates, half of what a datasheet quotes with sparsity.
        source: where the rates stand.
    """

    name: str
    arch: int
    memory_gib: float
    hbm_bytes_per_s: float
    fp8_flops: float
    bf16_flops: float
    source: str

    def flops(self, quantized: bool) -> float:
        """The peak rate of the GEMMs of a recipe."""
        return self.fp8_flops if quantized else self.bf16_flops


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", 90, 139.8, 4.8e12, 1979e12, 989e12, "NVIDIA H200 datasheet, SXM column"),
        Gpu("H100", 90, 79.1, 3.35e12, 1979e12, 989e12, "NVIDIA H100 datasheet, SXM column"),
        Gpu("B200", 100, 178.3, 8.0e12, 4500e12, 2250e12, "NVIDIA DGX B200 datasheet, an eighth"),
    )
}
