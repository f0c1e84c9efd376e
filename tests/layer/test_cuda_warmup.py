"""A warm-up on a GPU: processes that start on an empty cache, then a layer that compiles nothing
more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dgmoe_ops
from dgmoe_ops.backends.deep_gemm import jit_cache

SCRIPT = """
import json, sys
from pathlib import Path

import torch

import dgmoe_ops
from dgmoe_ops.backends.deep_gemm import jit_cache
from dgmoe_ops.testing.layer import layer_inputs

cache, recipe = Path(sys.argv[1]), sys.argv[2]
args, kwargs = layer_inputs(64, 8, 2, recipe, "cuda")
layer = torch.nn.Module()
layer.w13, layer.w13_scale, layer.w2, layer.w2_scale = args[3:7]
report = dgmoe_ops.warmup(layer, tokens=(1, 64), top_k=2, cache_dir=cache)
warm = jit_cache.kernels(cache)

def run(tokens, layout):
    some = [t[:tokens] for t in args[:3]]
    return torch.ops.dgmoe.fused_moe(*some, *args[3:], layout=layout, **kwargs)

for layout in ("masked", "contig"):
    run(64, layout)
    torch.cuda.synchronize()
    for tokens in (1, 17, 40):  # met by the warm-up only
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(tokens, layout)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(tokens, layout)), (layout, tokens)
torch.cuda.synchronize()
more = sorted(jit_cache.kernels(cache) - warm)
print(json.dumps({"calls": report.calls, "compiled": report.compiled, "more": more}))
"""

REFUSED = """
import torch

import dgmoe_ops

graph = torch.cuda.CUDAGraph()
held = torch.zeros(1, device="cuda")
shape = dgmoe_ops.LayerShape(4, 256, 128, 2)
with torch.cuda.graph(graph):
    held.add_(1)
    try:
        dgmoe_ops.warmup(shape, tokens=[1])
    except RuntimeError as error:
        assert "is capturing a graph" in str(error), error
    else:
        raise AssertionError("warmed up while capturing")
graph.replay()
torch.cuda.synchronize()
assert held.item() == 1
"""


@pytest.fixture(autouse=True)
def needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")


def start(script: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=Path(dgmoe_ops.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen) -> str:
    out, error = child.communicate(timeout=500)
    assert child.returncode == 0, error[-3000:]
    return out


@pytest.mark.parametrize("recipe", ["fp8_block", "bf16"])
def test_processes_share_an_empty_cache_and_the_layer_compiles_nothing_more(recipe, tmp_path):
    together = [start(SCRIPT, tmp_path, recipe) for _ in range(2)]
    reports = [json.loads(finish(child).splitlines()[-1]) for child in together]
    compiled = len(jit_cache.kernels(tmp_path))
    assert compiled > 0 and sum(report["compiled"] for report in reports) == compiled
    again = json.loads(finish(start(SCRIPT, tmp_path, recipe)).splitlines()[-1])
    assert again["compiled"] == 0 and again["calls"] == reports[0]["calls"]
    assert [report["more"] for report in (*reports, again)] == [[], [], []]


def test_a_capturing_stream_refuses():
    finish(start(REFUSED))
