"""torch.compile and export: no graph break, one graph for many token counts, the bits of eager."""

import pytest
import torch

import dgmoe_ops
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.testing.layer import layer_inputs


class Block(torch.nn.Module):
    """A layer with something to fuse before and after it."""

    def __init__(self, call, weights, kwargs):
        super().__init__()
        self.call, self.kwargs = call, kwargs
        self.names = []
        for name, tensor in zip(("w13", "w13_scale", "w2", "w2_scale"), weights, strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x, topk_weights, ids):
        y = self.call(
            x * 2,
            topk_weights,
            ids,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            **self.kwargs,
        )
        return y + x


def blocks(recipe, layout, device, call):
    args, kwargs = layer_inputs(24, 8, 2, recipe, device)
    return Block(call, args[3:], {"layout": layout, **kwargs}), args[:3]


CALLS = {"opaque": torch.ops.dgmoe.fused_moe, "inline": dgmoe_ops.fused_moe_inline}


@pytest.mark.parametrize("layout", ["masked", "contig", "auto"])
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("call", CALLS)
def test_compile_fullgraph_dynamic(call, recipe, layout, device):
    torch._dynamo.reset()
    block, (x, weights, ids) = blocks(recipe, layout, device, CALLS[call])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (24, 5, 17):
        fewer = [t[:tokens].clone() for t in (x, weights, ids)]
        assert torch.equal(compiled(*fewer), block(*fewer))
        if tokens == 24:
            first = len(graphs)  # tracing may start over once before it settles
    assert len(graphs) == first, "another token count must not compile another graph"


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp4"])
@pytest.mark.parametrize("call", CALLS)
def test_inductor(call, recipe, device):
    torch._dynamo.reset()
    block, inputs = blocks(recipe, "contig", device, CALLS[call])
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(*inputs), block(*inputs))


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("call", CALLS)
def test_export(call, recipe, device):
    block, inputs = blocks(recipe, "contig", device, CALLS[call])
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = {"x": {0: tokens}, "topk_weights": {0: tokens}, "ids": {0: tokens}}
    program = torch.export.export(block, inputs, dynamic_shapes=shapes)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    wanted = "dgmoe.fused_moe.default" if call == "opaque" else "dgmoe.ep_scatter.default"
    assert wanted in called
    fewer = [t[:7] for t in inputs]
    assert torch.equal(program.module()(*fewer), block(*fewer))


def test_out_overload_under_compile(device):
    torch._dynamo.reset()
    args, kwargs = layer_inputs(12, 4, 2, "fp8_block", device)

    def write(out):
        torch.ops.dgmoe.fused_moe.out(*args, out=out, **kwargs)
        return out + 1

    compiled = torch.compile(write, fullgraph=True, backend="aot_eager")
    buffer = torch.zeros_like(args[0])
    got = compiled(buffer)
    want = torch.ops.dgmoe.fused_moe(*args, **kwargs)
    assert torch.equal(buffer, want) and torch.equal(got, want + 1)
