"""Datasheet values of GPUs: what `plan` can be asked about, and the floors of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU on paper.

    Attributes:
        name: what `--gpu` takes.
        device_name: contained in what PyTorch calls the device.
        arch: compute capability major * 10 + minor.
        memory_gib: total memory as PyTorch reports it, below what the datasheet calls GB.
        hbm_bytes_per_s: peak memory rate.
        fp8_flops, bf16_flops: peak dense rates, half of what a datasheet quotes with sparsity.
        source: where the rates stand.
    """

    name: str
    device_name: str
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
        Gpu(
            "H200", "NVIDIA H200", 90, 139.8,
            4.8e12, 1979e12, 989e12, "NVIDIA H200 datasheet, SXM column",
        ),
        Gpu(
            "H200-NVL", "NVIDIA H200 NVL", 90, 139.8,
            4.8e12, 1671e12, 836e12, "NVIDIA H200 datasheet, NVL column",
        ),
        Gpu(
            "H100", "NVIDIA H100", 90, 79.1,
            3.35e12, 1979e12, 989e12, "NVIDIA H100 datasheet, SXM column",
        ),
        Gpu(
            "H100-PCIe", "NVIDIA H100 PCIe", 90, 79.1,
            2.0e12, 1513e12, 756e12, "NVIDIA H100 datasheet, PCIe column",
        ),
        Gpu(
            "B200", "NVIDIA B200", 100, 178.3,
            8.0e12, 4500e12, 2250e12, "NVIDIA DGX B200 datasheet, an eighth",
        ),
    )
}  # fmt: skip


def gpu_of(device_name: str) -> Gpu | None:
    """The GPU of a device by PyTorch's name of it; None where the table has no entry."""
    fits = [gpu for gpu in GPUS.values() if gpu.device_name in device_name]
    return max(fits, key=lambda gpu: len(gpu.device_name), default=None)
