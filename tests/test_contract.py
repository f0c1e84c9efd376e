"""No op lands half-added: each has all of its parts, and its fake says what it does."""

from __future__ import annotations

import re

import pytest
import torch
from contract import PYTHON_ROOMS, missing_parts, registered_ops, schemas
from helpers import E8M0, F8, OPS, op, samples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dgmoe_ops.testing import compare
from dgmoe_ops.testing.layer import layer_inputs

#: what an `.out` overload writes where that is more than `out`
BUFFERS = {
    "tf32_hc_prenorm_gemm": ("out", "sqr_sum"),
    "grouped_gemm_nt_f8f8bf16_masked": ("out", "workspace"),
    "grouped_gemm_nt_f8f8bf16_contig": ("out", "workspace"),
}

each_op = pytest.mark.parametrize("name", registered_ops())


def calls(name: str, device: torch.device) -> list[tuple[tuple, dict]]:
    """The arguments that the op is called with here."""
    if name != "fused_moe":
        return samples(name, device)
    return [
        layer_inputs(tokens, 4, 2, recipe, device)
        for recipe in ("bf16", "fp8_block")
        for tokens in (0, 7)
    ]


@each_op
def test_every_op_is_whole(name: str) -> None:
    missing = missing_parts(name)
    assert not missing, f"dgmoe::{name} lacks: {', '.join(missing)}"


def test_every_op_is_under_test() -> None:
    assert set(registered_ops()) == {*OPS, *PYTHON_ROOMS}


def test_a_half_added_op_is_rejected() -> None:
    with torch.library._scoped_library("dgmoe", "FRAGMENT") as library:
        library.define("half_added(Tensor x) -> Tensor")
        assert "half_added" in registered_ops()
        nothing = missing_parts("half_added")
        library.impl("half_added", lambda x: x.clone(), "CPU")
        with_kernel = missing_parts("half_added")
        torch.library.register_fake("dgmoe::half_added", torch.empty_like, lib=library)
        with_fake = missing_parts("half_added")
    assert nothing == [
        "room",
        "contract header",
        "checks for fakes",
        "CPU kernel",
        "CUDA kernel",
        "fake kernel",
        "autograd refusal",
        "oracle",
        "oracle signature",
        "sample",
        "wrapper with docstring",
        "wrapper signature",
        "test file",
        "benchmark",
        "reference row",
    ]
    assert with_kernel == [part for part in nothing if part != "CPU kernel"]
    assert with_fake == [part for part in with_kernel if part != "fake kernel"]
    assert "half_added" not in registered_ops()


def test_no_kernel_is_registered_for_a_misspelt_op() -> None:
    dangling = torch._C._dispatch_find_dangling_impls()
    assert not [line for line in dangling if "dgmoe::" in line]


@each_op
def test_schemas_are_functional(name: str) -> None:
    for schema in schemas(name):
        text = str(schema)
        assert "Tensor!" not in text and "(*" not in text, text
        # Strings leak across the stable C++ boundary, which ops of Python do not cross.
        assert name in PYTHON_ROOMS or not re.search(r"\bstr\b", text), text
        if schema.overload_name == "out":
            written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
            buffers = BUFFERS.get(name, ("out",))
            assert tuple(a.name for a in written) == buffers and not schema.returns, text
            for alias, buffer in zip("ab", buffers, strict=False):
                assert re.search(rf"Tensor\({alias}!\)\?? {buffer}\b", text), text
        else:
            values = [*schema.arguments, *schema.returns]
            assert all(value.alias_info is None for value in values), text


def assert_same_layout(name: str, fake: torch.Tensor, real: torch.Tensor) -> None:
    for attribute in ("dtype", "device"):
        assert getattr(fake, attribute) == getattr(real, attribute), f"{name}: {attribute}"
    assert tuple(map(int, fake.shape)) == tuple(real.shape), f"{name}: fake shape {fake.shape}"
    strides = tuple(map(int, fake.stride()))
    assert strides == real.stride(), f"{name}: fake strides {strides}, real {real.stride()}"
    assert int(fake.storage_offset()) == real.storage_offset() == 0, f"{name}: storage offset"


@each_op
def test_fake_agrees_with_real(name: str, device: torch.device) -> None:
    """Shape, dtype and strides, those of size-1 dimensions too, on static sizes."""
    for args, kwargs in calls(name, device):
        real = compare.outputs(op(name)(*args, **kwargs))
        with FakeTensorMode() as mode:
            fake_args, fake_kwargs = torch.utils._pytree.tree_map_only(
                torch.Tensor, mode.from_tensor, (args, kwargs)
            )
            fake = compare.outputs(op(name)(*fake_args, **fake_kwargs))
        for one, other in zip(fake, real, strict=True):
            assert_same_layout(name, one, other)


def traced_outputs(name: str, args: tuple, kwargs: dict) -> tuple[torch.Tensor, ...]:
    """The fake outputs of the one node that the op makes when it is traced with symbolic sizes."""
    tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor)]

    def call(*tensors):
        supply = iter(tensors)
        fresh = [next(supply) if isinstance(a, torch.Tensor) else a for a in args]
        named = {
            key: next(supply) if isinstance(value, torch.Tensor) else value
            for key, value in kwargs.items()
        }
        return op(name)(*fresh, **named)

    graph = make_fx(call, tracing_mode="symbolic")(*tensors).graph
    nodes = [node for node in graph.nodes if node.target == op(name)]
    assert len(nodes) == 1, f"{name} is not one node of the graph: {graph}"
    return compare.outputs(nodes[0].meta["val"])


@each_op
def test_fake_agrees_with_real_on_symbolic_sizes(name: str, device: torch.device) -> None:
    for args, kwargs in calls(name, device):
        real = compare.outputs(op(name)(*args, **kwargs))
        for one, other in zip(traced_outputs(name, args, kwargs), real, strict=True):
            assert_same_layout(name, one, other)


@each_op
def test_opcheck(name: str, device: torch.device) -> None:
    for args, kwargs in calls(name, device):
        utils = ["test_schema", "test_faketensor", "test_autograd_registration"]
        if any(isinstance(arg, torch.Tensor) and arg.dtype in (F8, E8M0) for arg in args):
            # It compares inputs before and after by arithmetic, which fp8 has none of on CPU;
            # test_ops_common.py compares their bytes.
            utils.remove("test_schema")
        torch.library.opcheck(op(name), args, kwargs, test_utils=utils)


def test_opcheck_of_the_out_overload(device: torch.device) -> None:
    args, kwargs = layer_inputs(5, 4, 2, "bf16", device)
    kwargs["out"] = torch.empty_like(args[0])
    torch.library.opcheck(torch.ops.dgmoe.fused_moe.out, args, kwargs, test_utils="test_schema")
