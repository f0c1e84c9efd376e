"""How routers score and choose experts: the scores by name, and which model does what."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.route import Scoring


@dataclass(frozen=True)
class Routing:
    """One way to route, the models that do it, and the calls that do the same.

    The numbers are those of the released checkpoints that are named; a model's config has its own.

    Attributes:
        models: the model families.
        top_k: experts a token.
        scoring: the score.
        num_groups, topk_groups: experts come from the `topk_groups` best of `num_groups` groups.
        biased: whether a bias takes part in the choice, never in the weights.
        renormalize: whether the weights of a token are divided by their sum.
        routed_scaling_factor: multiplies the sum of the routed experts.
        hashed: whether a table names the experts of each token id.
        weight_on_input: whether weights multiply what the experts read.
    """

    models: str
    top_k: int
    scoring: Scoring
    num_groups: int = 1
    topk_groups: int = 1
    biased: bool = False
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    hashed: bool = False
    weight_on_input: bool = False

    @property
    def groups(self) -> str:
        """How groups of experts, or a table, limit the choice."""
        if self.hashed:
            return "a table by token id"
        if self.num_groups == 1:
            return "none"
        return "sum of a group's best two" if self.biased else "best score of a group"

    def _arguments(self, default: Scoring) -> list[str]:
        """What both calls take, as keywords."""
        given = []
        if self.scoring != default:
            given.append(f"scoring=Scoring.{self.scoring.name}")
        if self.biased:
            given.append("bias=bias")
        if self.num_groups > 1:
            given.append(f"num_groups={self.num_groups}, topk_groups={self.topk_groups}")
        if not self.renormalize:
            given.append("renormalize=False")
        if self.routed_scaling_factor != 1.0:
            given.append(f"routed_scaling_factor={self.routed_scaling_factor}")
        return given

    @property
    def call(self) -> str:
        """The call of the gate, with `logits`, `bias`, `token_ids` and `table`.

        Its weights are multiplied by the factor, so `fused_moe` takes them without one.
        """
        scaled = ["scale_on_output=True"] if self.routed_scaling_factor != 1.0 else []
        if self.hashed:
            given = ["token_ids", "table", "logits", *self._arguments(Scoring.SQRT_SOFTPLUS)]
            return f"hash_gate({', '.join([*given, *scaled])})"
        given = ["logits", str(self.top_k), *self._arguments(Scoring.SOFTMAX)]
        return f"topk_gate({', '.join([*given, *scaled])})"

    @property
    def block(self) -> str:
        """The call of the whole block, with `x`, `gate_weight` and `weights` besides.

        The factor goes to the block, which applies it once, to the sum.
        """
        given = [f"top_k={self.top_k}", *self._arguments(Scoring.SOFTMAX)]
        if self.hashed:
            given.append("token_ids=token_ids, hash_table=table")
        if self.weight_on_input:
            given.append("apply_router_weight_on_input=True")
        return f"moe_block(x, gate_weight, weights, {', '.join(given)})"


ROUTINGS = (
    Routing("Qwen3-MoE", 8, Scoring.SOFTMAX),
    Routing("gpt-oss", 4, Scoring.SOFTMAX),
    Routing("Mixtral", 2, Scoring.SOFTMAX),
    Routing("OLMoE", 8, Scoring.SOFTMAX, renormalize=False),
    Routing("DeepSeek-V2-Lite", 6, Scoring.SOFTMAX, renormalize=False),
    Routing(
        "DeepSeek-V2",
        6,
        Scoring.SOFTMAX,
        num_groups=8,
        topk_groups=3,
        renormalize=False,
        routed_scaling_factor=16.0,
    ),
    Routing("ERNIE-4.5-21B-A3B", 6, Scoring.SOFTMAX, biased=True),
    Routing(
        "DeepSeek-V3, V3.2 and R1",
        8,
        Scoring.SIGMOID,
        num_groups=8,
        topk_groups=4,
        biased=True,
        routed_scaling_factor=2.5,
    ),
    Routing("Kimi-K2", 8, Scoring.SIGMOID, biased=True, routed_scaling_factor=2.827),
    Routing("GLM-4.5", 8, Scoring.SIGMOID, biased=True, routed_scaling_factor=2.5),
    Routing("MiniMax-M2, GLM-4.5-Air", 8, Scoring.SIGMOID, biased=True),
    Routing("Llama 4", 1, Scoring.SIGMOID, renormalize=False, weight_on_input=True),
    Routing("DeepSeek-V4-Flash", 6, Scoring.SQRT_SOFTPLUS, biased=True, routed_scaling_factor=1.5),
    Routing(
        "DeepSeek-V4-Flash, its first layers",
        6,
        Scoring.SQRT_SOFTPLUS,
        routed_scaling_factor=1.5,
        hashed=True,
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
        "| models | score | groups | bias in the choice | weights sum to 1 | call of the gate"
        " | call of the block |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in ROUTINGS:
        biased, renormalize = ("yes" if flag else "no" for flag in (one.biased, one.renormalize))
        calls = f"`{one.call}`", f"`{one.block}`"
        cells = [one.models, names[one.scoring], one.groups, biased, renormalize, *calls]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
