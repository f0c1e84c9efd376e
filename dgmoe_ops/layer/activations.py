"""The gated activations: their names, parameters and formulas. Wrappers, the layer, the guide's
table and the tests draw from `ACTIVATIONS`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """A number that an activation takes.

    Attributes:
        name: the keyword of the ops and of the layer.
        default: what it is when not given.
        required: must be given.
        optional: may be None, and then has no effect: a limit of None does not clamp.
        positive: must be above 0; otherwise any finite number will do.
    """

    name: str
    default: float | None = None
    required: bool = False
    optional: bool = False
    positive: bool = True


@dataclass(frozen=True)
class Activation:
    """One row of the table.

    Attributes:
        name: what `fused_moe(activation=...)` takes.
        op: the op family, `<op>` and `<op>_post_quant_{masked,contig}`.
        parameters: what it takes besides gate and up.
        formula: of gate g and up u, in fp32.
        used_by: models that have it.
    """

    name: str
    op: str
    parameters: tuple[Parameter, ...]
    formula: str
    used_by: str


ACTIVATIONS: dict[str, Activation] = {
    row.name: row
    for row in (
        Activation(
            "silu",
            "silu_and_mul",
            (Parameter("swiglu_limit", optional=True),),
            "g = min(g, limit), u = clamp(u, -limit, limit); g * sigmoid(g) * u",
            "most MoE models; with a limit DeepSeek-V4",
        ),
        Activation(
            "swigluoai",
            "silu_and_mul",
            (
                Parameter("gemm1_alpha", default=1.702, positive=False),
                Parameter("gemm1_clamp_limit", default=7.0, optional=True),
            ),
            "g = min(g, limit), u = clamp(u, -limit, limit); g * sigmoid(alpha * g) * (u + 1)",
            "gpt-oss",
        ),
        Activation(
            "situ",
            "situ_and_mul",
            (Parameter("beta", required=True), Parameter("linear_beta", required=True)),
            "beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)",
            "Kimi-K3",
        ),
    )
}
#: what each parameter is when a call of the layer does not give it
DEFAULTS = {p.name: p.default for row in ACTIVATIONS.values() for p in row.parameters}
_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the normal numbers of fp32


def _refuse(where: str, name: str, arg: str, must: str, value: object) -> None:
    raise ValueError(f"{where}activation {name!r}: {arg} must {must}, got {value!r}")


def float32_fault(value: object, positive: bool = False) -> str | None:
    """Return what a parameter of a kernel must be and `value` is not, or None.

    Kernels hold it as float32: it must be finite there, and not become subnormal or 0.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "be a number"
    if not math.isfinite(value) or abs(value) > _MOST:
        return "be finite as float32"
    if positive and value < _LEAST:
        return "be positive as float32, at least 1.18e-38"
    if 0 < abs(value) < _LEAST:
        return "be 0 or at least 1.18e-38 in magnitude, so that float32 holds it"
    return None


def _check_value(where: str, name: str, parameter: Parameter, value: float) -> None:
    fault = float32_fault(value, parameter.positive)
    if fault is not None:
        _refuse(where, name, parameter.name, fault, value)


def activation_keywords(
    name: str, given: dict[str, float | None], where: str = ""
) -> dict[str, float | None]:
    """Return the keywords of the activation's op, defaults filled in for what is not given.

    A parameter that the activation does not take must be None or its default. Values are not
    looked at otherwise: they may be symbolic. Raises ValueError, starting with `where`, naming an
    unknown activation, a parameter that it does not take, or one that it needs.
    """
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{where}activation must be one of {known}, got {name!r}")
    taken = {parameter.name: parameter for parameter in ACTIVATIONS[name].parameters}
    for arg, value in given.items():
        if arg not in taken and value is not None and value != DEFAULTS.get(arg):
            _refuse(where, name, arg, f"be None (it takes {', '.join(taken)})", value)
    values = {}
    for arg, parameter in taken.items():
        values[arg] = given.get(arg, parameter.default)
        if values[arg] is None and not parameter.optional:
            _refuse(where, name, arg, "be given" if parameter.required else "be a number", None)
    return values


def check_activation(name: str, where: str = "", **given: float | None) -> dict[str, float | None]:
    """Return what `activation_keywords` returns, after a look at the values.

    Raises ValueError naming what is wrong.
    """
    values = activation_keywords(name, given, where)
    for parameter in ACTIVATIONS[name].parameters:
        if values[parameter.name] is not None:
            _check_value(where, name, parameter, values[parameter.name])
    return values


def _parameter_text(parameter: Parameter) -> str:
    if parameter.required:
        return f"`{parameter.name}`"
    return f"`{parameter.name}={parameter.default}`"


def activation_table() -> str:
    """Lay out the activations as Markdown."""
    lines = ["| activation | parameters | of gate g and up u | used by |", "|---|---|---|---|"]
    for row in ACTIVATIONS.values():
        parameters = ", ".join(_parameter_text(parameter) for parameter in row.parameters)
        lines.append(f"| `{row.name}` | {parameters} | `{row.formula}` | {row.used_by} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(activation_table())
