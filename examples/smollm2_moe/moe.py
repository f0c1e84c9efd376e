"""The module that takes a dense FFN's place: a router in front of `torch.ops.dgmoe.fused_moe`."""

from __future__ import annotations

import torch

from dgmoe_ops import prepare_weights

from .split import Split


def target_of(device: torch.device) -> str:
    """The `prepare_weights` target of a device."""
    if device.type != "cuda":
        return "cpu"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm90", 10: "sm100", 12: "sm120"}.get(major, "sm90")


class MoEFeedForward(torch.nn.Module):
    """Route each token to `top_k` experts and run them in one call of the layer.

    Args:
        split: the experts and their router.
        recipe: "bf16" or "fp8_block".
        top_k: experts a token. All of them make the layer equal the dense FFN, up to rounding.
    """

    def __init__(self, split: Split, recipe: str, top_k: int) -> None:
        super().__init__()
        device = split.w13.device
        prepared = prepare_weights(
            split.w13, None, split.w2, None, recipe=recipe, target=target_of(device)
        )
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            self.register_buffer(name, getattr(prepared, name), persistent=False)
        self.register_buffer("router", split.router, persistent=False)
        self.recipe = recipe
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
