"""What only a GPU shows: graphs, streams, other devices, bits that do not move, big offsets."""

import subprocess
import sys

import pytest
import torch

import dgmoe_ops
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.layer import layer_inputs, relative_error
from dgmoe_ops.testing.samples import SAMPLES


@pytest.fixture(autouse=True)
def needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")


def run(args, kwargs, layout):
    return torch.ops.dgmoe.fused_moe(*args, layout=layout, **kwargs)


@pytest.mark.parametrize("layout", ["masked", "contig", "auto"])
@pytest.mark.parametrize("recipe", ["fp8_block", "bf16"])
def test_graph_replays_with_other_tokens_ids_and_loads(recipe, layout, device):
    args, kwargs = layer_inputs(64, 16, 4, recipe, device)
    x, weights, ids = (t.clone() for t in args[:3])
    static = (x, weights, ids, *args[3:])
    run(static, kwargs, layout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static, kwargs, layout)
    g = torch.Generator().manual_seed(7)
    loads = {
        "even": torch.randint(0, 16, (64, 4), generator=g),
        "one hot expert": torch.full((64, 4), 5),
        "no expert": torch.full((64, 4), -1),
        "first two": torch.randint(0, 2, (64, 4), generator=g),
        "sentinels": torch.randint(-1, 40, (64, 4), generator=g),
    }
    for name, new_ids in loads.items():
        x.copy_(torch.randn(64, x.shape[1], generator=g).to(torch.bfloat16))
        weights.copy_(torch.rand(64, 4, generator=g))
        ids.copy_(new_ids)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(static, kwargs, layout)), name


@pytest.mark.parametrize("recipe", ["fp8_block", "bf16"])
def test_bits_do_not_depend_on_batch_layout_or_run(recipe, device):
    args, kwargs = layer_inputs(4096, 32, 4, recipe, device)
    x, weights, ids = args[:3]
    whole = run(args, kwargs, "masked")
    assert torch.equal(run(args, kwargs, "contig"), whole)
    for _ in range(50):
        assert torch.equal(run(args, kwargs, "masked"), whole)
    for start, length in ((0, 1), (17, 1), (4095, 1), (100, 7), (1000, 64), (2000, 129)):
        part = slice(start, start + length)
        for layout in ("masked", "contig"):
            got = run((x[part], weights[part], ids[part], *args[3:]), kwargs, layout)
            assert torch.equal(got, whole[part]), (start, length, layout)


def test_cpu_and_cuda_agree(device):
    args, kwargs = layer_inputs(200, 8, 2, "fp8_block", device)
    here = run(args, kwargs, "masked")
    there = run([None if t is None else t.cpu() for t in args], kwargs, "masked")
    assert relative_error(here.cpu(), there) < 5e-3


def test_another_stream(device):
    args, kwargs = layer_inputs(512, 8, 2, "fp8_block", device)
    want = run(args, kwargs, "masked")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    x = torch.empty_like(args[0])
    with torch.cuda.stream(stream):
        torch.cuda._sleep(
            20_000_000
        )  # a kernel on the default stream would read x before it is written
        x.copy_(args[0])
        got = run((x, *args[1:]), kwargs, "masked")
    stream.synchronize()
    assert torch.equal(got, want)


SECOND_GPU = """
import torch
from dgmoe_ops.reference.layer import fused_moe_quantized_ref
from dgmoe_ops.testing.layer import layer_inputs, relative_error

def on(device):
    args, kwargs = layer_inputs(100, 8, 2, "fp8_block", device)
    return args, kwargs

args, kwargs = on("cuda:1")
assert torch.cuda.current_device() == 0
got = [torch.ops.dgmoe.fused_moe(*args, layout=name, **kwargs) for name in ("masked", "contig")]
assert got[0].device == torch.device("cuda:1") and torch.equal(*got)
assert torch.cuda.current_device() == 0
assert relative_error(got[0].cpu(), fused_moe_quantized_ref(*args, **kwargs).cpu()) < 3e-2
args, kwargs = on("cuda:0")
try:
    torch.ops.dgmoe.fused_moe(*args, **kwargs)
except RuntimeError as error:
    assert "one GPU a process" in str(error) and "cuda:1" in str(error), error
else:
    raise AssertionError("DeepGEMM took a second GPU")
"""


def test_a_device_that_is_not_current(device):
    """The layer follows its tensors; DeepGEMM stays with the first GPU that a process uses."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = subprocess.run([sys.executable, "-c", SECOND_GPU], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", [name for name in sorted(SAMPLES) if "gemm" not in name])
def test_ops_follow_their_tensors(name, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    args, kwargs = SAMPLES[name].tiny("cuda:1")
    assert torch.cuda.current_device() == 0
    compare.check(name, args, kwargs)
    assert torch.cuda.current_device() == 0


def test_offsets_past_two_to_the_31(device):
    """Rows of the slab and of the segments beyond element 2^31, with real memory."""
    tokens, experts, top_k, hidden, inter = 8192, 128, 8, 4096, 256
    g = torch.Generator(device=device).manual_seed(3)
    x = torch.randn(tokens, hidden, generator=g, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, experts, (tokens, top_k), generator=g, device=device)
    ids[-1] = torch.arange(experts - top_k, experts, device=device)
    weights = torch.rand(tokens, top_k, generator=g, device=device)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=g, device=device, dtype=torch.bfloat16)
    w2 = torch.randn(experts, hidden, inter, generator=g, device=device, dtype=torch.bfloat16)
    prepared = dgmoe_ops.prepare_weights(w13 * hidden**-0.5, None, w2 * inter**-0.5, None)
    kwargs = {"recipe": "fp8_block", "num_experts": experts}
    assert (experts - top_k) * tokens * hidden > 2**31  # the last experts start past it
    last = slice(tokens - 3, tokens)
    for layout in ("masked", "contig"):
        whole = run((x, weights, ids, *prepared.tensors), kwargs, layout)
        few = run((x[last], weights[last], ids[last], *prepared.tensors), kwargs, layout)
        assert torch.equal(whole[last], few), layout
    # Segments past 2^31 elements: every token eight times, four times the tokens.
    rows, _, m_indices, src2dst = dgmoe_ops.ops.ep_scatter(
        x.repeat(8, 1), None, ids.int().repeat(8, 1), experts
    )
    assert rows.numel() > 2**31
    flat = src2dst.long().flatten()
    sample = torch.arange(0, flat.numel(), 4099, device=device)
    sample = torch.cat([sample, flat.argmax()[None]])
    assert torch.equal(rows[flat[sample]], x[sample // top_k % tokens])
    assert (m_indices[flat[sample]] == ids.flatten()[sample % ids.numel()]).all()


def test_no_layout_moves_under_capture(device):
    from dgmoe_ops.formats.recipes import FP8_BLOCK
    from dgmoe_ops.layer.fused_moe import resolve_layout

    args, _ = layer_inputs(8, 16, 2, "fp8_block", device)
    for tokens in (1, 64, 10**6):
        before = resolve_layout("auto", tokens, 8, args[3], args[5], FP8_BLOCK)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.zeros(1, device=device)
            captured = resolve_layout("auto", tokens, 8, args[3], args[5], FP8_BLOCK)
        assert captured == before
