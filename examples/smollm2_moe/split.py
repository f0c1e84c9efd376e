"""Split a dense gated FFN into experts, and fit a router that tells which of them a token needs.

`ffn(x) = sum over neurons i of silu(gate_i . x) * (up_i . x) * down_i` is a sum, so any partition
of the neurons makes experts whose sum is the FFN. Source of the idea: Zhang et al., "MoEfication:
Transformer Feed-forward Layers are Mixtures of Experts", ACL 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_ROUNDS = 6  # of k-means; it has settled by then
_PROFILE = 2048  # tokens in a neuron's profile: more cost time and change little
_RIDGE = 1e-3


@dataclass(frozen=True)
class Split:
    """A gated FFN as experts.

    Attributes:
        w13: (experts, 2 * width, hidden), gate rows then up rows.
        w2: (experts, hidden, width).
        router: (experts, hidden + 1) float32, scores by `x @ router[:, :-1].T + router[:, -1]`.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    router: torch.Tensor


def assign_balanced(scores: torch.Tensor) -> torch.Tensor:
    """Give each row of scores (neurons, experts) an expert, all experts equally many neurons.

    Rounds of proposals: a neuron proposes to the best expert with room, and an expert takes the
    proposals that score highest.
    """
    neurons, experts = scores.shape
    labels = torch.full((neurons,), -1, device=scores.device)
    room = [neurons // experts] * experts
    scores = scores.clone()
    while (free := (labels < 0).nonzero()[:, 0]).numel():
        best, choice = scores[free].max(dim=1)
        for expert in choice.unique().tolist():
            wanting = (choice == expert).nonzero()[:, 0]
            order = best[wanting].argsort(descending=True, stable=True)[: room[expert]]
            labels[free[wanting[order]]] = expert
            room[expert] -= len(order)
            if room[expert] == 0:
                scores[:, expert] = -torch.inf
    return labels


def cluster_balanced(features: torch.Tensor, experts: int) -> torch.Tensor:
    """Cluster features (neurons, d) by balanced k-means.

    It starts from the neurons in order of size, so there is no random number in it.
    """
    neurons = features.shape[0]
    order = features.norm(dim=1).argsort(descending=True, stable=True)
    labels = torch.empty(neurons, dtype=torch.int64, device=features.device)
    labels[order] = torch.arange(neurons, device=features.device) * experts // neurons
    for _ in range(_ROUNDS):
        members = F.one_hot(labels, experts).T.to(features.dtype)
        centroids = members @ features * (experts / neurons)
        moved = assign_balanced(-torch.cdist(features, centroids))
        if torch.equal(moved, labels):
            break
        labels = moved
    return labels


def fit_router(x: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Fit by ridge regression the log of the experts' output norms (tokens, experts) to x."""
    inputs = F.pad(x, (0, 1), value=1.0)
    gram = inputs.T @ inputs
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, inputs.T @ norms.clamp_min(1e-6).log()).T.contiguous()


@torch.no_grad()
def split_ffn(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, experts: int
) -> Split:
    """Split an FFN by which neurons work together on the calibration tokens.

    Args:
        gate, up: (intermediate, hidden).
        down: (hidden, intermediate).
        x: (tokens, hidden) inputs of this FFN on the calibration text.
        experts: divides intermediate.

    Raises:
        ValueError: intermediate is no multiple of experts.
    """
    intermediate, hidden = gate.shape
    if intermediate % experts:
        raise ValueError(f"experts must divide {intermediate}, got {experts}")
    wide_gate, wide_up, wide_down, x = gate.float(), up.float(), down.float(), x.float()
    act = F.silu(x @ wide_gate.T) * (x @ wide_up.T)
    profile = act[:: max(1, len(act) // _PROFILE)].abs() * wide_down.norm(dim=0)
    labels = cluster_balanced(profile.T.contiguous(), experts)
    neurons = labels.argsort(stable=True).view(experts, -1)
    w13 = torch.cat([gate[neurons], up[neurons]], dim=1)
    w2 = down.T[neurons].transpose(1, 2).contiguous()
    norms = [(act[:, n] @ wide_down[:, n].T).norm(dim=1) for n in neurons]
    return Split(w13, w2, fit_router(x, torch.stack(norms, dim=1)))
