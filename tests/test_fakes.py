"""A fake refuses what the op refuses, with its words, no more, and guards on nothing."""

from __future__ import annotations

import pytest
import torch
from contract import PYTHON_ROOMS, registered_ops
from helpers import OPS, op
from hypothesis import given
from hypothesis import strategies as st
from test_contract import assert_same_layout
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import dgmoe_ops
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.layer import layer_inputs
from dgmoe_ops.testing.mutations import Named, mutations
from dgmoe_ops.testing.samples import SAMPLES

#: integers by which an op finds rows, and what is in range whatever the sizes
INDICES = {
    "masked_m": 0,
    "m_indices": -1,
    "src2dst": -1,
    "output_index": -1,
    "token_ids": 0,
    "table": 0,
}
#: what an op says of contents, which a fake does not have
ABOUT_CONTENTS = "token_ids must be rows of the table"
#: what only the library or the device of a call refuses, when it gets there
ABOUT_DEVICES = (" on CUDA", " on SM")


def beyond_fakes(refusal: str) -> bool:
    """Whether a refusal rests on what a fake does not have: contents, addresses, a library."""
    return ABOUT_CONTENTS in refusal or any(where in refusal for where in ABOUT_DEVICES)


each_op = pytest.mark.parametrize("name", registered_ops())


def by_name(name: str, args: tuple, kwargs: dict) -> Named:
    """The arguments by name, indices such that no row is out of range whatever else changes."""
    names = [argument.name for argument in op(name)._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    return {
        arg: torch.full_like(value, INDICES[arg]) if arg in INDICES and value is not None else value
        for arg, value in named.items()
    }


def sample_calls(name: str, device: torch.device) -> list[Named]:
    if name in PYTHON_ROOMS:
        recipes = ("bf16", "fp8_block", "mxfp4")
        return [by_name(name, *layer_inputs(5, 4, 2, recipe, device)) for recipe in recipes]
    sample = SAMPLES[name]
    calls = [sample.tiny(device), *sample.edge(device)[-2:]]
    return [by_name(name, *call) for call in calls]


def outcome(overload: torch._ops.OpOverload, named: Named) -> str | tuple[torch.Tensor, ...]:
    """The words of a refusal, or the results."""
    try:
        result = overload(**named)
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return compare.outputs(result) if result is not None else ()


def in_mode(mode: FakeTensorMode, named: Named) -> Named:
    return {
        arg: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
        for arg, value in named.items()
    }


def check_agreement(overload: torch._ops.OpOverload, named: Named, what: str) -> bool:
    """Hold the fake against the op for one call; return whether both refuse it."""
    real = outcome(overload, named)
    with FakeTensorMode() as mode:
        fake = outcome(overload, in_mode(mode, named))
    where = f"{overload}: {what}"
    if isinstance(real, str) and beyond_fakes(real):
        return False
    if isinstance(real, str) or isinstance(fake, str):
        assert fake == real, where
        return True
    for one, other in zip(fake, real, strict=True):
        assert_same_layout(where, one, other)
    return False


def check_mutations(overload: torch._ops.OpOverload, named: Named) -> int:
    """The number of mutated calls that are refused."""
    refused = 0
    for what, changed in mutations(overload._schema, named):
        refused += check_agreement(overload, changed, what)
    return refused


@each_op
def test_fake_refuses_what_the_op_refuses(name: str, device: torch.device) -> None:
    refused = [check_mutations(op(name), named) for named in sample_calls(name, device)]
    assert all(refused), "no mutation was refused: the generator is too tame"


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_random_calls_are_refused_alike(name: str, data: st.DataObject) -> None:
    named = by_name(name, *SAMPLES[name].random(data.draw, torch.device("cpu")))
    changed = list(mutations(op(name)._schema, named))
    what, call = changed[data.draw(st.integers(0, len(changed) - 1))]
    check_agreement(op(name), call, what)


OUT_OPS = [name for name in registered_ops() if "out" in getattr(torch.ops.dgmoe, name).overloads()]


@pytest.mark.parametrize("name", OUT_OPS)
def test_fake_refuses_buffers_that_the_op_refuses(name: str, device: torch.device) -> None:
    overload = getattr(torch.ops.dgmoe, name).out
    buffers = [a.name for a in overload._schema.arguments if a.alias_info and a.alias_info.is_write]
    named = sample_calls(name, device)[0]
    outs = compare.outputs(op(name)(**named))
    given_buffers = dict(zip(buffers, outs, strict=False))  # a workspace is optional
    refused = 0
    for what, changed in mutations(overload._schema, named | given_buffers):
        if what.split()[0] in buffers:
            refused += check_agreement(overload, changed, what)
    assert refused


def symbolic(mode: FakeTensorMode, named: Named, unbacked: bool = False) -> Named:
    """Fakes of which every size is a symbol: with the given one as its hint, or with none."""
    dynamic = DimDynamic.UNBACKED if unbacked else DimDynamic.DYNAMIC

    def fake(value):
        if not isinstance(value, torch.Tensor):
            return value
        context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * value.dim())
        return mode.from_tensor(value, symbolic_context=context)

    return {arg: fake(value) for arg, value in named.items()}


@each_op
def test_checks_add_no_guard(name: str, device: torch.device) -> None:
    """Symbolic sizes are refused by their hints, with the words of the op, and stay symbolic."""
    named = sample_calls(name, device)[0]
    refusals = 0
    for what, changed in mutations(op(name)._schema, named):
        real = outcome(op(name), changed)
        if not isinstance(real, str) or beyond_fakes(real):
            continue
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = symbolic(mode, changed)
        before = len(mode.shape_env.guards)
        with mode:
            fake = outcome(op(name), fakes)
        assert fake == real, f"{name}: {what}"
        assert len(mode.shape_env.guards) == before, f"{name}: {what}"
        refusals += 1
    assert refusals


def test_unknown_sizes_are_no_reason_to_refuse() -> None:
    """With unbacked sizes what does not depend on them is refused, and nothing else."""
    x = torch.zeros(6, 256, dtype=torch.bfloat16)
    ids = torch.zeros(6, 2, dtype=torch.int32)
    legal = {"hidden_states": x, "topk_ids": ids, "num_local_experts": 4}
    longer = {"topk_ids": torch.zeros(7, 2, dtype=torch.int32)}
    bad = ({"hidden_states": x.double()}, {"group_size": 64}, {"expert_start": -1})
    name = "moe_ep_deepgemm_preprocess"
    mode = FakeTensorMode(shape_env=ShapeEnv())
    for changed in ({}, longer):
        call = symbolic(mode, legal | changed, unbacked=True)
        with mode:
            result = outcome(op(name), call)
        assert not isinstance(result, str), result
    for changed in bad:
        call = symbolic(mode, legal | changed, unbacked=True)
        with mode:
            fake = outcome(op(name), call)
        assert fake == outcome(op(name), legal | changed)


def test_fakes_name_the_device_of_the_call() -> None:
    ids, weights = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"src2dst must be on the device of y \(cpu\), got meta"):
        # One tensor on meta, and PyTorch calls the fake.
        torch.ops.dgmoe.post_reorder_deepgemm(
            torch.zeros(4, 8, dtype=torch.bfloat16), ids.to("meta"), weights
        )
    args, kwargs = layer_inputs(5, 4, 2, "bf16", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"w13 must be on the device of hidden_states \(cpu\)"):
        torch.ops.dgmoe.fused_moe(*args[:3], args[3].to("meta"), *args[4:], **kwargs)
    if torch.cuda.device_count() == 1:
        pytest.skip("where there are GPUs, PyTorch makes fakes for those alone")
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda:1")
        where = torch.empty(2, 2, dtype=torch.int32, device="cuda:1")
        weights = torch.empty(2, 2, device="cpu")
        with pytest.raises(ValueError, match=r"be on the device of y \(cuda:1\), got cpu"):
            torch.ops.dgmoe.post_reorder_deepgemm(y, where, weights)
        with pytest.raises(ValueError, match=r"be on the device of y \(cuda:1\), got cuda:0"):
            torch.ops.dgmoe.post_reorder_deepgemm(y, where, weights.to("cuda:0"))


class Layer(torch.nn.Module):
    def __init__(self, call, **kwargs) -> None:
        super().__init__()
        self.call, self.kwargs = call, kwargs

    def forward(self, *args):
        return self.call(*args, **self.kwargs)


@pytest.mark.parametrize("strict", [False, True])
def test_export_refuses_what_the_layer_refuses(device: torch.device, strict: bool) -> None:
    args, kwargs = layer_inputs(5, 4, 2, "bf16", device)
    layer = Layer(torch.ops.dgmoe.fused_moe, **kwargs | {"recipe": "nonsense"})
    message = "dgmoe::fused_moe: recipe must be one of .*, got 'nonsense'"
    with pytest.raises(Exception, match=message):
        torch.export.export(layer, args, strict=strict)


def test_compile_refuses_what_the_op_refuses(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        torch.ops.dgmoe.quant_group_fp8, backend="eager", fullgraph=True, dynamic=True
    )
    x = torch.zeros(3, 256, dtype=torch.float16, device=device)
    message = "dgmoe::quant_group_fp8: x must be bfloat16 or float32, got float16"
    with pytest.raises(Exception, match=message):
        compiled(x, 128, 0)
    args, kwargs = layer_inputs(5, 4, 2, "bf16", device)
    buffer = torch.empty(5, 255, dtype=torch.bfloat16, device=device)
    with pytest.raises(Exception, match="fused_moe: out must have the shape of hidden_states"):
        torch.compile(torch.ops.dgmoe.fused_moe.out, backend="eager", fullgraph=True)(
            *args, **kwargs, out=buffer
        )


def test_grad_is_refused_whoever_wraps_the_tensor(device: torch.device) -> None:
    """By fakes, and by the transforms of `torch.func`, whose inner tensors require no grad."""
    x = torch.ones(4, 8, device=device)
    message = "dgmoe::align_scale: scale must not require grad"
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x).requires_grad_()
        with pytest.raises(RuntimeError, match=message):
            dgmoe_ops.ops.align_scale(fake)
        with torch.no_grad():
            dgmoe_ops.ops.align_scale(fake)
    for follow in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=message):
            follow(lambda scale: dgmoe_ops.ops.align_scale(scale).sum())(x)
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(dgmoe_ops.ops.align_scale, (x,), (x,))
