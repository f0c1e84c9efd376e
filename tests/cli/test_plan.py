"""`plan`: its numbers by hand, its bytes against what the ops allocate, its choice against the
layer's."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner  # noqa: E402
from helpers import replace_gemms  # noqa: E402

import dgmoe_ops  # noqa: E402
from dgmoe_ops import config, layouts  # noqa: E402
from dgmoe_ops.analysis import memory, roofline, routing  # noqa: E402
from dgmoe_ops.analysis.gpus import GPUS  # noqa: E402
from dgmoe_ops.cli.main import main  # noqa: E402
from dgmoe_ops.formats.layouts import Layout  # noqa: E402
from dgmoe_ops.formats.recipes import RECIPES  # noqa: E402
from dgmoe_ops.layer import fused_moe as layer  # noqa: E402
from dgmoe_ops.layer import stages  # noqa: E402
from dgmoe_ops.layer.device import Device  # noqa: E402
from dgmoe_ops.ops import gemm  # noqa: E402

SMALL = {"tokens": 4, "experts": 4, "hidden": 256, "intermediate": 128, "top-k": 2}
#: (recipe, what the weights are prepared for); scales are packed for sm100.
KINDS = [
    ("bf16", "cpu"),
    ("fp8_block", "cpu"),
    ("fp8_block", "sm100"),
    ("mxfp8", "cpu"),
    ("mxfp4", "cpu"),
    ("mxfp4", "sm100"),
]
#: tokens, experts, local experts, hidden, intermediate, top_k; the last ones are padded
SIZES = [
    (7, 4, 4, 256, 128, 2),
    (130, 8, 5, 300, 200, 3),
    (1, 6, 6, 576, 96, 1),
    (0, 2, 2, 8, 8, 1),
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def invoke(*arguments: str, **options: object):
    sizes = {**SMALL, **{name.replace("_", "-"): value for name, value in options.items()}}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    return CliRunner().invoke(main, ["plan", *flags, *arguments])


def document(*arguments: str, **options: object) -> dict:
    done = invoke("--json", *arguments, **options)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def call_of(sizes: tuple[int, ...], recipe: str, target: str) -> memory.Call:
    return memory.Call(*sizes, RECIPES[recipe], packed=target == "sm100")


def inputs(call: memory.Call, target: str):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(call.tokens, call.hidden, generator=g).to(torch.bfloat16)
    local, inter = call.local_experts, call.intermediate
    w13 = torch.randn(local, 2 * inter, call.hidden, generator=g).to(torch.bfloat16)
    w2 = torch.randn(local, call.hidden, inter, generator=g).to(torch.bfloat16)
    ids = torch.cat([*routing.random_ids(call, 0), torch.empty(0, call.top_k, dtype=torch.int64)])
    weights = torch.rand(call.tokens, call.top_k, generator=g)
    prepared = dgmoe_ops.prepare_weights(w13, None, w2, None, call.recipe.name, target)
    return (x, weights, ids), prepared


# ---- numbers by hand ----


def test_the_small_case_by_hand() -> None:
    plan = document(recipe="fp8_block")
    masked, contig = plan["layouts"]["masked"], plan["layouts"]["contig"]
    assert masked["slab_rows_per_expert"] == 256 and masked["rows"] == 4 * 256
    # 8 assignments over 4 experts: four used segments of 128 rows, and no whole one of the rest.
    assert contig["rows"] == 128 * 4
    # Even routing: two rows an expert.
    assert masked["even_routing"] == {
        "valid_rows": 8,
        "tile_rows": 512,
        "padding_rows": 1016,
        "padding_share": 1016 / 1024,
    }
    assert contig["even_routing"]["padding_share"] == 504 / 512
    kept = 4 * 4 + 4 * 4 * 2  # masked_m, src2dst
    assert [stage["live_bytes"] for stage in masked["stages"]] == [
        1024 * (256 + 2 * 4) + kept,
        1024 * (256 + 2 * 4 + 256 * 2) + kept,
        1024 * (256 * 2 + 128 + 4) + kept,
        1024 * (128 + 4 + 256 * 2) + kept,
        1024 * 256 * 2 + 4 * 256 * 2 + kept,
    ]
    assert masked["peak_bytes"] == masked["stages"][1]["live_bytes"]
    kept = 512 * 4 + 4 * 4 * 2  # m_indices, src2dst
    scratch = 4 * (256 + 2 * 4) + 2 * 4 * 4  # the quantised tokens; counts and offsets
    assert contig["stages"][0]["live_bytes"] == 512 * (256 + 2 * 4) + kept + scratch
    assert contig["peak_bytes"] == 512 * (256 + 2 * 4 + 256 * 2) + kept
    assert plan["weight_bytes"] == 4 * (3 * 128 * 256 + 4 * (2 * 2 + 2 * 1))
    # 8 rows through 2 * 3 * 128 * 256 operations
    assert masked["flops"] == contig["flops"] == 8 * 6 * 128 * 256
    assert plan["floor_seconds"] == pytest.approx(4 * 3 * 128 * 256 / 4.8e12)


def test_the_choice_of_the_small_case() -> None:
    choice = document()["choice"]
    assert (choice["layout"], choice["decided_by"]) == ("masked", "slab against budget")
    assert [link["layout"] for link in choice["chain"]] == [None] * 5 + ["masked"]
    plan = document(device_memory_gib=0.001)
    assert plan["choice"]["layout"] == "contig"
    assert plan["slab_bytes"] > plan["budget_bytes"] == int(int(0.001 * 2**30) * 0.25)
    few = document(tokens=1, top_k=1, experts=8)["choice"]
    assert (few["layout"], few["decided_by"]) == ("contig", "rows against experts")
    cpu = document(gpu="cpu")
    assert (cpu["choice"]["layout"], cpu["choice"]["decided_by"]) == ("contig", "device")
    assert cpu["floor_seconds"] is None and cpu["layouts"]["masked"]["seconds"] is None
    forced = document(layout="masked", gpu="cpu")["choice"]
    assert (forced["layout"], forced["decided_by"]) == ("masked", "argument")
    assert {link["says"] for link in forced["chain"][1:]} == {"not reached"}


def test_the_environment_decides_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGMOE_LAYOUT", "contig")
    choice = document()["choice"]
    assert (choice["layout"], choice["decided_by"]) == ("contig", "DGMOE_LAYOUT")
    monkeypatch.setenv("DGMOE_LAYOUT", "both")
    done = invoke()
    assert done.exit_code == 1 and "DGMOE_LAYOUT must be one of" in done.output


def test_scales_are_those_that_the_gpu_takes() -> None:
    assert document(gpu="H200")["call"]["packed"] is False
    plan = document(gpu="b200")
    assert plan["call"]["packed"] is True and not plan["illegal"]
    # Two groups of 128: two floats a row, or one word.
    rows = plan["layouts"]["masked"]["rows"]
    assert plan["layouts"]["masked"]["stages"][0]["tensors"]["scale"] == rows * 4
    for gpu in ("H200", "b200", "cpu"):
        plan = document(gpu=gpu, recipe="mxfp8")
        assert plan["call"]["packed"] is True and not plan["illegal"]
        assert plan["layouts"]["masked"]["stages"][0]["tensors"]["scale"] == rows * 2 * 4


def test_fp4_weights_take_half_a_byte_a_value_and_their_activations_a_whole_one() -> None:
    fp8, fp4 = (document(recipe=recipe) for recipe in ("mxfp8", "mxfp4"))
    scales = 4 * (256 * 2 * 4 + 256 * 1 * 4)
    assert fp8["weight_bytes"] == 4 * 3 * 128 * 256 + scales
    assert fp4["weight_bytes"] == 4 * 3 * 128 * 128 + scales
    rows = [plan["layouts"]["contig"]["stages"][0]["tensors"]["rows"] for plan in (fp8, fp4)]
    assert rows[0] == rows[1] == 512 * 256
    assert fp4["slab_bytes"] == fp8["slab_bytes"]


# ---- bytes against real tensors ----


@pytest.mark.parametrize("layout", tuple(Layout))
@pytest.mark.parametrize(("recipe", "target"), KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bytes_are_those_that_the_ops_allocate(sizes, recipe, target, layout) -> None:
    call = call_of(sizes, recipe, target)
    (x, weights, ids), prepared = inputs(call, target)
    w13, w13_scale, w2, w2_scale = prepared.tensors
    assert prepared.nbytes == call.local_experts * sum(call.weight_bytes_per_expert())
    call_stages = stages.Stages(
        recipe=call.recipe,
        layout=layout,
        form=call.form,
        experts=call.local_experts,
        expert_start=0,
        padded_hidden=call.recipe.columns_of(w13),
        expected_m=1,
    )
    placed = stages.place(call_stages, x, ids)
    gate_up = stages.gemm(call_stages, placed.rows, placed.scale, w13, w13_scale, placed.index)
    act, act_scale = stages.activate(call_stages, gate_up, placed.index)
    y = stages.gemm(call_stages, act, act_scale, w2, w2_scale, placed.index)
    out = dgmoe_ops.ops.post_reorder_deepgemm(y, placed.src2dst, weights, hidden_size=call.hidden)
    outputs = [placed, (gate_up,), (act, act_scale), (y,), (out,)]
    for stage, tensors in zip(memory.stages(call, layout), outputs, strict=True):
        real = [0 if t is None else t.untyped_storage().nbytes() for t in tensors]
        assert list(stage.tensors.values()) == real, stage
    assert placed.rows.numel() == call.rows(layout) * call.padded_hidden


def allocated_at_most(run) -> int:
    """The most bytes that are allocated at one time while `run` runs, from the allocator's log."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert kept is not None and events
    return most


@pytest.mark.parametrize("layout", tuple(Layout))
@pytest.mark.parametrize(("recipe", "target"), KINDS)
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_peak_is_what_the_allocator_sees(monkeypatch, sizes, recipe, target, layout) -> None:
    call = call_of(sizes, recipe, target)
    tokens, prepared = inputs(call, target)
    named = {"recipe": recipe, "num_experts": call.experts, "layout": layout}
    # The allocations of a GEMM without the workspace of the CPU kernel: as on CUDA.
    replace_gemms(monkeypatch, lambda name, real: getattr(gemm, f"_{name}_fake"))

    def run() -> torch.Tensor:
        return dgmoe_ops.fused_moe_inline(*tokens, *prepared.tensors, **named)

    run()
    assert allocated_at_most(run) == memory.peak(call, layout)


# ---- the choice is the layer's ----


@given(
    layout=st.sampled_from(["auto", "auto", "masked", "contig"]),
    tokens=st.integers(0, 20000),
    top_k=st.integers(1, 10),
    experts=st.integers(1, 512),
    recipe=st.sampled_from(sorted(RECIPES)),
    memory_bytes=st.none() | st.integers(2**20, 2**38),
)
def test_the_layer_takes_what_is_explained(
    layout, tokens, top_k, experts, recipe, memory_bytes
) -> None:
    call = memory.Call(tokens, experts, experts, 1024, 512, top_k, RECIPES[recipe])
    facts = call.facts(layout, memory_bytes)
    explained = layouts.explain_layout(facts)
    decisive = [link for link in explained.links if link.layout is not None]
    assert [(link.name, link.layout) for link in decisive] == [
        (explained.decided_by, explained.layout)
    ]
    assert explained.layout == layouts.choose_layout(facts)
    device = torch.device("cpu" if memory_bytes is None else "cuda:0")
    per = RECIPES[recipe].values_per_element
    w13 = SimpleNamespace(shape=(experts, 1024, 1024 // per), device=device)
    w2 = SimpleNamespace(shape=(experts, 1024, 512 // per))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "device_of", lambda device: Device("cpu", memory_bytes))
        taken = layer.resolve_layout(layout, tokens, top_k, w13, w2, RECIPES[recipe])
    assert taken == explained.layout


# ---- work and routing ----


def test_roofline_is_the_longer_of_moving_and_computing() -> None:
    gpu = GPUS["H200"]
    assert roofline.Work("x", 48 * 10**8, 0).seconds(gpu, True) == pytest.approx(1e-3)
    assert roofline.Work("x", 1, 1979 * 10**9).seconds(gpu, True) == pytest.approx(1e-3)
    assert roofline.Work("x", 1, 989 * 10**9).seconds(gpu, False) == pytest.approx(1e-3)


def test_moved_bytes_by_hand() -> None:
    call = memory.Call(4, 4, 4, 256, 128, 2, RECIPES["fp8_block"])
    w13, w2 = 2 * 128 * 256 + 4 * 2 * 2, 256 * 128 + 4 * 2 * 1
    x, act, gate_up, y = 256 + 8, 128 + 4, 512, 512
    index = 4 * 8
    tokens = 4 * 512
    assert [part.moved for part in roofline.work(call, Layout.MASKED, [2, 2, 2, 2])] == [
        tokens + 8 * x + 2 * index,
        8 * (x + gate_up) + 4 * w13,
        8 * (gate_up + act),
        8 * (act + y) + 4 * w2,
        8 * y + 2 * index + tokens,
    ]
    first = roofline.work(call, Layout.CONTIG, [8, 0, 0, 0])
    assert first[0].moved == tokens + 8 * x + 2 * index + 2 * 4 * x
    assert first[1].moved == 8 * (x + gate_up) + w13


def test_row_counts_count_a_token_once_and_only_here() -> None:
    ids = torch.tensor([[0, 0], [1, -1], [0, 7], [2, 1]])
    assert routing.row_counts(ids, 3) == [2, 2, 1]
    assert routing.row_counts(ids[:0], 3) == [0, 0, 0]


@pytest.mark.parametrize("sizes", [(5, 4, 3, 2), (0, 4, 4, 2), (7, 3, 3, 3), (64, 16, 5, 4)])
def test_even_counts_go_round_robin(sizes) -> None:
    tokens, experts, local, top_k = sizes
    call = memory.Call(tokens, experts, local, 8, 8, top_k, RECIPES["bf16"])
    ids = (torch.arange(tokens * top_k) % experts).reshape(tokens, top_k)
    assert routing.even_counts(call) == routing.row_counts(ids, local)
    if sizes == (5, 4, 3, 2):
        assert routing.even_counts(call) == [3, 3, 2]


def test_a_random_routing_is_the_same_in_parts(monkeypatch) -> None:
    call = memory.Call(37, 16, 5, 8, 8, 2, RECIPES["bf16"])
    (whole,) = routing.random_ids(call, 3)
    assert whole.shape == (37, 2) and all(len(set(row)) == 2 for row in whole.tolist())
    wanted = routing.row_counts(whole, 5)
    assert routing.random_counts(call, 3) == wanted != routing.random_counts(call, 4)
    monkeypatch.setattr(routing, "_MOST_VALUES", 64)
    parts = [*routing.random_ids(call, 3)]
    assert [len(part) for part in parts] == [4] * 9 + [1]
    assert torch.equal(torch.cat(parts), whole)
    assert routing.random_counts(call, 3) == wanted


# ---- the command ----


def test_the_tables_say_what_the_document_says() -> None:
    plan, done = document(), invoke()
    assert done.exit_code == 0
    peaks = [f"{layout['peak_bytes']:,} B" for layout in plan["layouts"].values()]
    for text in (*peaks, "decided by slab against budget", "roofline time", "H200 datasheet"):
        assert text in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_experts": 5}, "--local-experts 5 is more than --experts 4"),
        ({"top_k": 5}, "--top-k 5 is more than --experts 4"),
        ({"gpu": "cpu", "device_memory_gib": 3}, "a CPU has no slab budget"),
        ({"recipe": "fp4"}, "'fp4' is not one of 'bf16', 'fp8_block'"),
    ],
)
def test_impossible_calls_are_refused(options: dict, said: str) -> None:
    done = invoke(**options)
    assert done.exit_code == 2 and said in done.output


BOUNDS = {
    "tokens": (0, 2**24),
    "experts": (1, 2**14),
    "local-experts": (1, 2**14),
    "hidden": (1, 2**18),
    "intermediate": (1, 2**18),
    "top-k": (1, 2**10),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_sizes_have_bounds_and_help_says_them(name: str) -> None:
    low, high = BOUNDS[name]
    shown = " ".join(CliRunner().invoke(main, ["plan", "--help"]).output.split())
    assert f"{low}<=x<={high}" in shown
    for value in (low - 1, high + 1, 2**31 - 1, 2**63, -(2**31)):
        done = invoke(**{name: value})
        assert done.exit_code == 2, (value, done.output)
        assert f"'--{name}': {value} is not in the range {low}<=x<={high}" in done.output


@pytest.mark.parametrize("gpu", [*GPUS, "cpu"])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_largest_sizes_are_planned_at_once(gpu: str, recipe: str) -> None:
    largest = {name: high for name, (_, high) in BOUNDS.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = document(**largest, gpu=gpu, recipe=recipe)
    even = plan["layouts"]["contig"]["even_routing"]
    assert even["valid_rows"] == 2**24 * 2**10
    plan = document(**{**largest, "top-k": 1, "experts": 1, "local-experts": 1}, gpu=gpu)
    assert plan["layouts"]["masked"]["even_routing"]["valid_rows"] == 2**24
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # in KiB


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", str(2**20 + 1)])
def test_memory_that_is_none(value: str) -> None:
    done = invoke(device_memory_gib=value)
    assert done.exit_code == 2 and "is not in the range 0<x<=1048576" in done.output


def test_errors_are_json_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def error_of(done) -> dict:
        assert done.stderr == ""
        (key,) = found = json.loads(done.stdout)
        assert key == "error" and found[key]["exit_code"] == done.exit_code
        return found[key]

    said = error_of(invoke("--json", experts=2**31 - 1))
    assert said["exit_code"] == 2 and "--experts" in said["message"]
    assert error_of(invoke("--json", top_k=5))["message"] == "--top-k 5 is more than --experts 4"
    assert error_of(invoke("--json", "--nonsense"))["exit_code"] == 2
    missing = error_of(CliRunner().invoke(main, ["plan", "--json"]))
    assert missing["exit_code"] == 2 and "--tokens" in missing["message"]
    plot = str(tmp_path / "x.nonsense")
    assert error_of(invoke("--json", "--plot", plot))["exit_code"] == 1
    monkeypatch.setenv("DGMOE_LAYOUT", "both")
    said = error_of(invoke("--json"))
    assert said["exit_code"] == 1 and "DGMOE_LAYOUT must be one of" in said["message"]
    plain = invoke()
    assert plain.exit_code == 1 and plain.stdout == "" and "Error: DGMOE_LAYOUT" in plain.stderr


def test_no_tokens_is_a_plan() -> None:
    plan = document(tokens=0)
    assert plan["choice"]["layout"] == "contig" and plan["layouts"]["contig"]["rows"] == 0
    assert invoke(tokens=0).exit_code == 0


def test_plot_draws_a_random_and_a_given_routing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = document("--plot", str(tmp_path / "random.png"), seed=5)["plot"]
    assert drawn["layouts"]["masked"]["valid_rows"] == 8
    assert (tmp_path / "random.png").read_bytes().startswith(b"\x89PNG")
    ids = tmp_path / "ids.json"
    ids.write_text("[[0, 0], [1, -1], [0, 7], [2, 1]]")
    drawn = document("--plot", str(tmp_path / "given.svg"), "--routing", str(ids))["plot"]
    assert drawn["layouts"]["contig"]["valid_rows"] == 5
    assert drawn["layouts"]["contig"]["tile_rows"] == 3 * 128
    ids.write_text("[[0, 1]]")
    done = invoke("--plot", str(tmp_path / "given.svg"), "--routing", str(ids))
    assert done.exit_code == 2 and "must have 4 tokens of 2 ids, got (1, 2)" in done.output
    ids.write_text("no list")
    assert invoke("--plot", str(tmp_path / "x.svg"), "--routing", str(ids)).exit_code == 2


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("plan", b"\x89PNG"),
        ("plan.", b"\x89PNG"),
        (".hidden", b"\x89PNG"),
        ("plan.PNG", b"\x89PNG"),
        ("plan.v1.svg", b"<?xml"),
        ("plan.pdf", b"%PDF"),
    ],
)
def test_plot_writes_the_file_that_it_names(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "drawn" / name
    file.parent.mkdir()
    assert document("--plot", str(file))["plot"]["file"] == str(file)
    assert [*file.parent.iterdir()] == [file] and file.read_bytes().startswith(begins)
    assert f"Drawn: {file}" in invoke("--plot", str(file)).output.replace("\n", "")


def test_plot_refuses_what_is_no_name_of_a_drawing(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for option in ("--plot", "--routing"):
        done = invoke(option, "", *(() if option == "--plot" else ("--plot", "x.png")))
        assert done.exit_code == 2 and f"'{option}': must not be empty" in done.output
    for name in (".", "..", str(tmp_path)):
        assert invoke("--plot", name).exit_code == 2
    done = invoke("--plot", "x.nonsense")
    assert done.exit_code == 1 and "--plot: Format 'nonsense' is not supported" in done.output
    done = invoke("--plot", "none/x.png")
    assert done.exit_code == 1 and "--plot: " in done.output
    assert not [*tmp_path.iterdir()]


def test_plot_bounds_what_it_draws_at_random(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = str(tmp_path / "x.png")
    done = invoke("--plot", file, tokens=2**20, experts=512)
    assert done.exit_code == 2 and "at most 268435456 tokens times experts" in done.output


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "dgmoe_ops.cli.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke("--plot", str(tmp_path / "x.png"))
    assert done.exit_code == 1 and "pip install matplotlib" in done.output


def test_the_module_runs_and_says_what_it_lacks() -> None:
    code = (
        "import sys, runpy; sys.modules['click'] = None; sys.argv = ['dgmoe_ops', 'doctor'];"
        "runpy.run_module('dgmoe_ops', run_name='__main__')"
    )
    root = Path(dgmoe_ops.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs click, which is not installed: pip install click rich" in done.stderr
    assert "Traceback" not in done.stderr
