"""Small grouped GEMMs with results that bf16 holds: no accumulation order can hide an error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

M, N, K, EXPERTS = 256, 136, 384, 3
MASKED_M = [5, 0, 130]


@dataclass
class Case:
    a: torch.Tensor  # (experts, m, k)
    b: torch.Tensor
    a_scale: torch.Tensor  # powers of two, (experts, m, groups)
    b_scale: torch.Tensor  # powers of two, (experts, n blocks, k blocks)
    masked_m: torch.Tensor
    m_indices: torch.Tensor  # of the slabs laid end to end

    def expected(self, quantized: bool) -> torch.Tensor:
        a, b = self.a.double(), self.b.double()
        if quantized:
            a = a * self.a_scale.double().repeat_interleave(128, -1)[..., :K]
            rows = self.b_scale.double().repeat_interleave(128, -2)[..., :N, :]
            b = b * rows.repeat_interleave(128, -1)[..., :K]
        return torch.einsum("emk,enk->emn", a, b).bfloat16()

    def valid(self) -> torch.Tensor:
        return torch.arange(M, device=self.a.device) < self.masked_m[:, None]


def integers(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """-1, 0 and 1, few enough of them that sums stay below 2^8 and bf16 holds them exactly."""
    values = torch.randint(-1, 2, shape, generator=generator)
    return (values * (torch.rand(shape, generator=generator) < 0.5)).float()


def case(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    groups, blocks = -(-K // 128), -(-N // 128)
    a = integers((EXPERTS, M, K), generator).to(dtype).to(device)
    b = integers((EXPERTS, N, K), generator).to(dtype).to(device)
    # One scale a row and a block: exact whatever a kernel does first.
    a_scale = torch.pow(2.0, torch.randint(-5, 6, (EXPERTS, M, 1), generator=generator).float())
    b_scale = torch.pow(
        2.0, torch.randint(-5, 6, (EXPERTS, blocks, 1), generator=generator).float()
    )
    masked_m = torch.tensor(MASKED_M, dtype=torch.int32)
    m_indices = torch.full((EXPERTS, M), -1, dtype=torch.int32)
    for e, count in enumerate(MASKED_M):
        m_indices[e, :count] = e
    return Case(
        a,
        b,
        a_scale.repeat(1, 1, groups).to(device),
        b_scale.repeat(1, 1, groups).to(device),
        masked_m.to(device),
        m_indices.flatten().to(device),
    )
