"""torch.compile and export: no graph break, one graph for many token counts, the bits of eager."""

import pytest
import torch

import dgmoe_ops
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.layer import checks
from dgmoe_ops.layer import fused_moe as layer_module
from dgmoe_ops.layer.device import Device
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


COUNTS = (17, 0, 1, 2, 3, 128, 1000)


def on_a_gpu(monkeypatch, memory_bytes: int) -> None:
    """Let the layer choose as on a GPU of so much memory, running on the CPU."""
    known = Device("cpu", memory_bytes)
    for module in (checks, layer_module):
        monkeypatch.setattr(module, "device_of", lambda device: known)


def graphs_of(call, inputs, mark=None, counts=COUNTS, dynamic=True):
    """Compile a call and run it for many token counts against eager; return what was traced, a
    graph for each count that needed one."""
    torch._dynamo.reset()
    traced = []

    def backend(graph, example):
        traced.append((tokens, graph))
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
    for tokens in counts:
        fewer = [t[:tokens].clone() for t in inputs]
        want = call(*fewer)
        for tensor in fewer if mark else ():
            mark(tensor)
        assert torch.equal(compiled(*fewer), want)
    return dict(traced)


def layouts_in(graph) -> set[str]:
    ops = [str(n.target) for n in graph.graph.nodes if "grouped_gemm" in str(n.target)]
    return {name for name in ("masked", "contig") for op in ops if name in op}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "mxfp4"])
def test_the_choice_of_a_gpu_sets_no_guard(monkeypatch, recipe):
    """0 and 1 tokens are graphs of their own in any case; all others share one, which no number of
    tokens can make too large."""
    on_a_gpu(monkeypatch, 100 << 30)
    args, kwargs = layer_inputs(1000, 8, 2, recipe, "cpu")

    def call(x, weights, ids):
        return dgmoe_ops.fused_moe_inline(x, weights, ids, *args[3:], **kwargs)

    graphs = graphs_of(call, args[:3])
    assert set(graphs) == {17, 0, 1}
    assert layouts_in(graphs[17]) == {"contig"}


def test_a_bounded_number_of_tokens_may_take_slabs(monkeypatch):
    args, kwargs = layer_inputs(1000, 8, 2, "bf16", "cpu")

    def call(x, weights, ids):
        return dgmoe_ops.fused_moe_inline(x, weights, ids, *args[3:], **kwargs)

    def mark(tensor):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=1024)

    for memory_bytes, wanted in ((100 << 30, "masked"), (1 << 20, "contig")):
        on_a_gpu(monkeypatch, memory_bytes)
        graphs = graphs_of(call, args[:3], mark, (17, 2, 1000), None)  # static weights
        assert set(graphs) == {17} and layouts_in(graphs[17]) == {wanted}


@pytest.mark.parametrize("layout", ["auto", "masked", "contig"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_tokens_that_only_the_run_tells(monkeypatch, recipe, layout):
    on_a_gpu(monkeypatch, 100 << 30)
    args, kwargs = layer_inputs(1000, 8, 2, recipe, "cpu")

    def call(x, weights, ids):
        return dgmoe_ops.fused_moe_inline(x, weights, ids, *args[3:], layout=layout, **kwargs)

    def mark(tensor):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)

    graphs = graphs_of(call, args[:3], mark)
    assert set(graphs) == {17}


@pytest.mark.parametrize("call", CALLS)
def test_export_without_bounds(monkeypatch, call):
    on_a_gpu(monkeypatch, 100 << 30)
    block, inputs = blocks("fp8_block", "auto", "cpu", CALLS[call])
    tokens = torch.export.Dim("tokens", min=0)
    shapes = {"x": {0: tokens}, "topk_weights": {0: tokens}, "ids": {0: tokens}}
    program = torch.export.export(block, inputs, dynamic_shapes=shapes)
    for count in (2, 3, 17, 24):
        fewer = [t[:count] for t in inputs]
        assert torch.equal(program.module()(*fewer), block(*fewer))
