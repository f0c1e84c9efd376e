"""The module that takes a dense FFN's place: a router in front of `torch.ops.dgmoe.fused_moe`."""

from __future__ import annotations

import torch

from dgmoe_ops import MoEWeights


class MoEFeedForward(torch.nn.Module):
    """Route each token to `top_k` experts and run them in one call of the layer.

    Args:
        router: (experts, hidden + 1) float32, as `Split` has it.
        prepared: the experts' weights.
        top_k: experts a token. All of them make the layer equal the dense FFN, up to rounding.
    """

    def __init__(self, router: torch.Tensor, prepared: MoEWeights, top_k: int) -> None:
        super().__init__()
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            self.register_buffer(name, getattr(prepared, name), persistent=False)
        self.register_buffer("router", router, persistent=False)
        self.recipe = prepared.recipe
        self.top_k = top_k
        self.expert_bytes = prepared.nbytes

    @property
    def num_experts(self) -> int:
        return self.router.shape[0]

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick experts for x (tokens, hidden).

        Returns:
            weights (tokens, top_k) float32, all 1 since the experts are parts of one sum, and ids
            (tokens, top_k) int32.
        """
        if self.top_k == self.num_experts:
            ids = torch.arange(self.top_k, device=x.device).expand(x.shape[0], -1)
        else:
            scores = x.float() @ self.router[:, :-1].T + self.router[:, -1]
            ids = scores.topk(self.top_k, dim=1).indices
        weights = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
        return weights, ids.to(torch.int32)

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.route(flat)
        out = torch.ops.dgmoe.fused_moe(
            flat.to(torch.bfloat16),
            weights,
            ids,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            recipe=self.recipe,
        )
        return out.view_as(hidden_states).to(hidden_states.dtype)
