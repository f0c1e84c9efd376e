"""How routers score and choose experts: the scores by name, and which model does what."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.route import Scoring


@dataclass(frozen=True)
class Routing:
    """One way to route, the models that do it, and the call that does the same.

    Attributes:
        models: the model families.
        scoring: the score.
        groups: how groups of experts limit the choice.
        biased: whether a bias takes part in the choice, never in the weights.
        renormalize: whether the weights of a token are divided by their sum.
        call: an example with `logits`, `bias`, `token_ids` and `table`.
    """

    models: str
    scoring: Scoring
    groups: str
    biased: bool
    renormalize: bool
    call: str


ROUTINGS = (
    Routing(
        "Qwen3-MoE, Mixtral, gpt-oss",
        Scoring.SOFTMAX,
        "none",
        False,
        True,
        "topk_gate(logits, 8)",
    ),
    Routing(
        "OLMoE, DeepSeek-V2-Lite",
        Scoring.SOFTMAX,
        "none",
        False,
        False,
        "topk_gate(logits, 6, renormalize=False)",
    ),
    Routing(
        "DeepSeek-V2",
        Scoring.SOFTMAX,
        "best score of a group",
        False,
        False,
        "topk_gate(logits, 6, num_groups=8, topk_groups=3, renormalize=False,"
        " routed_scaling_factor=16.0, scale_on_output=True)",
    ),
    Routing(
        "ERNIE-4.5-MoE",
        Scoring.SOFTMAX,
        "none",
        True,
        True,
        "topk_gate(logits, 6, bias=bias)",
    ),
    Routing(
        "DeepSeek-V3, V3.2 and R1",
        Scoring.SIGMOID,
        "sum of a group's best two",
        True,
        True,
        "topk_gate(logits, 8, scoring=Scoring.SIGMOID, bias=bias, num_groups=8, topk_groups=4,"
        " routed_scaling_factor=2.5, scale_on_output=True)",
    ),
    Routing(
        "Kimi-K2, GLM-4.5, MiniMax-M2",
        Scoring.SIGMOID,
        "none",
        True,
        True,
        "topk_gate(logits, 8, scoring=Scoring.SIGMOID, bias=bias)",
    ),
    Routing(
        "Llama 4",
        Scoring.SIGMOID,
        "none",
        False,
        False,
        "topk_gate(logits, 1, scoring=Scoring.SIGMOID, renormalize=False)",
    ),
    Routing(
        "DeepSeek-V4",
        Scoring.SQRT_SOFTPLUS,
        "none",
        True,
        True,
        "topk_gate(logits, 6, scoring=Scoring.SQRT_SOFTPLUS, bias=bias,"
        " routed_scaling_factor=1.5, scale_on_output=True)",
    ),
    Routing(
        "DeepSeek-V4, its first layers",
        Scoring.SQRT_SOFTPLUS,
        "a table by token id",
        False,
        True,
        "hash_gate(token_ids, table, logits, routed_scaling_factor=1.5, scale_on_output=True)",
    ),
)


def routing_table() -> str:
    """Lay `ROUTINGS` out as Markdown, a line a routing."""
    names = {
        Scoring.SOFTMAX: "softmax",
        Scoring.SIGMOID: "sigmoid",
        Scoring.SQRT_SOFTPLUS: "sqrt(softplus)",
        Scoring.IDENTITY: "identity",
    }
    lines = [
        "| models | score | groups | bias in the choice | weights sum to 1 | call |",
        "|---|---|---|---|---|---|",
    ]
    for one in ROUTINGS:
        biased, renormalize = ("yes" if flag else "no" for flag in (one.biased, one.renormalize))
        cells = [one.models, names[one.scoring], one.groups, biased, renormalize, f"`{one.call}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
