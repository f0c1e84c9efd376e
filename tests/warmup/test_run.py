"""A warm-up with a runner that is none, with the ops on a CPU, and with little memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import replace_gemms

import dgmoe_ops
from dgmoe_ops import LayerShape, config, plan_warmup, warmup
from dgmoe_ops.backends import scopes
from dgmoe_ops.backends.deep_gemm import jit_cache
from dgmoe_ops.formats.layouts import Layout
from dgmoe_ops.formats.recipes import RECIPES
from dgmoe_ops.testing.layer import layer_inputs
from dgmoe_ops.warmup.operands import OpRunner, operand_bytes, weight_bytes
from dgmoe_ops.warmup.plan import layer_calls, layers_of
from dgmoe_ops.warmup.run import WarmupReport, _fit, legal_layouts

SHAPE = LayerShape(4, 256, 128, 2, "fp8_block")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in config.VARIABLES:
        monkeypatch.setenv(variable.name, variable.default)  # a warm-up may set some
    monkeypatch.setenv(jit_cache.FOLDER_VARIABLE, str(tmp_path / "default"))
    monkeypatch.setenv(jit_cache.NVRTC_VARIABLE, "0")
    monkeypatch.delitem(sys.modules, jit_cache.LIBRARY, raising=False)


class Compiler:
    """Compiles a kernel a group and rows in 256s, as a folder in the cache."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.calls = cache / "cache", []

    def __call__(self, call) -> None:
        self.calls.append(call)
        name = "kernel.x." + "_".join(map(str, (*call.group, call.spec.m // 256)))
        (self.cache / name).mkdir(parents=True, exist_ok=True)


def run(cache: Path, what=SHAPE, tokens=(1, 600), **kwargs) -> tuple[WarmupReport, Compiler]:
    compiler = Compiler(cache)
    kwargs = {"runner": compiler, "cache_dir": cache, **kwargs}
    return warmup(what, tokens=tokens, **kwargs), compiler


def test_every_planned_call_runs_once_and_new_kernels_are_counted(tmp_path, capsys) -> None:
    report, compiler = run(tmp_path)
    plan = plan_warmup(SHAPE, tokens=(1, 600))
    assert sorted(map(repr, compiler.calls)) == sorted(map(repr, plan))
    assert report.calls == len(plan) and report.compiled == len(jit_cache.kernels(tmp_path)) > 4
    assert report.loaded == report.calls - report.compiled
    assert report.cache_dir == str(tmp_path) and report.shrunk == () and report.seconds > 0
    assert capsys.readouterr().err == ""
    again, compiler = run(tmp_path)
    assert again.calls == len(compiler.calls) == len(plan)
    assert (again.compiled, again.loaded) == (0, len(plan))


def test_kernels_that_were_removed_are_compiled_and_counted_again(tmp_path) -> None:
    first, _ = run(tmp_path)
    for name in sorted(jit_cache.kernels(tmp_path))[:2]:
        for file in (tmp_path / "cache" / name).iterdir():
            file.unlink()
        (tmp_path / "cache" / name).rmdir()
    assert run(tmp_path)[0].compiled == 2
    more, _ = run(tmp_path, tokens=(1, 900))
    assert 0 < more.compiled < first.compiled


def test_the_largest_call_of_a_group_is_first(tmp_path) -> None:
    _, compiler = run(tmp_path)
    groups = {call.group for call in compiler.calls}
    for group in groups:
        rows = [
            (call.spec.m, call.spec.expected_m) for call in compiler.calls if call.group == group
        ]
        assert rows == sorted(rows, reverse=True)


def test_counting_is_injectable(tmp_path) -> None:
    seen: list[str] = []

    def list_kernels(folder: Path) -> set[str]:
        assert folder == tmp_path
        return set(seen)

    report, _ = run(
        tmp_path, runner=lambda call: seen.append(str(call.spec.m)), list_kernels=list_kernels
    )
    assert report.compiled == len(set(seen))


# ---- memory ----


def most(tokens: int, layout: str, shape: LayerShape = SHAPE) -> int:
    plan = plan_warmup(shape, tokens=[tokens], layouts=layout)
    return max(weight_bytes(call, False) + operand_bytes(call, False) for call in plan)


def test_what_does_not_fit_is_halved_and_named(tmp_path, capsys) -> None:
    free = most(1000, "masked")
    assert most(1025, "masked") > free >= most(1000, "contig")
    report, compiler = run(tmp_path, tokens=[1, 1000, 3000], free_bytes=lambda: free)
    masked, contig = report.shrunk
    assert (masked.layout, masked.asked, masked.done) == ("masked", 3000, 1000)
    assert masked.needed_bytes == most(3000, "masked") and masked.free_bytes == free
    assert contig.layout == "contig" and contig.done in (1500, 1000)
    fitting = [1, 1000, 750]
    assert set(compiler.calls) >= set(plan_warmup(SHAPE, tokens=fitting, layouts="masked"))
    told = capsys.readouterr().err
    for less in report.shrunk:
        assert str(less) in told and str(less) in str(report)
    assert "masked layout of 4 experts, hidden 256, intermediate 128, top-k 2, fp8_block" in told
    assert f"3000 tokens need {most(3000, 'masked'):,} bytes and {free:,} are free" in told
    assert "warmed up to 1000 tokens only" in told


def test_a_span_keeps_its_start_where_it_can(tmp_path) -> None:
    free = most(256, "masked")
    report, compiler = run(tmp_path, tokens=(100, 2000), layouts="masked", free_bytes=lambda: free)
    (less,) = report.shrunk
    assert (less.asked, less.done) == (2000, 250)
    assert set(compiler.calls) == set(plan_warmup(SHAPE, tokens=(100, 250), layouts="masked"))


def test_nothing_fits_is_an_error(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="masked layout of 4 experts.*even 1 tokens need"):
        run(tmp_path, free_bytes=lambda: 1000)
    assert not (tmp_path / "dgmoe_ops").exists()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_bytes_are_those_of_the_tensors(recipe, packed, monkeypatch) -> None:
    shape = LayerShape(3, 700, 200, 2, recipe)
    for call in plan_warmup(shape, tokens=[1, 129]):
        runner, given = OpRunner(torch.device("cpu"), packed), []

        def take(*arguments, given=given, **recipes):
            given += [t for t in arguments if isinstance(t, torch.Tensor)]

        monkeypatch.setattr(torch.ops, "dgmoe", type("ops", (), {call.op: staticmethod(take)}))
        runner(call)
        monkeypatch.undo()
        storage = sum(tensor.untyped_storage().nbytes() for tensor in given)
        rows = call.spec.m * (call.spec.experts if call.spec.masked else 1)
        assert (
            weight_bytes(call, packed) + operand_bytes(call, packed)
            == storage + rows * call.spec.n * 2
        )


# ---- the ops ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_operands_are_legal_for_the_ops(recipe, packed) -> None:
    runner = OpRunner(torch.device("cpu"), packed)
    for call in plan_warmup(LayerShape(3, 300, 200, 2, recipe), tokens=[1, 257]):
        runner(call)
        assert len(runner._made) == 1
    runner.release()
    assert not runner._made


def test_a_layer_calls_what_the_plan_names(monkeypatch) -> None:
    """The plan against the calls that the layer makes, operand by operand."""
    for recipe in RECIPES:
        for layout in Layout:
            for tokens in (1, 7, 300):
                args, kwargs = layer_inputs(tokens, 6, 2, recipe, "cpu")
                made = []

                def spying(op, real, made=made):
                    def spy(a, *rest, **recipes):
                        hint = rest[-1] if isinstance(rest[-1], int) else None
                        made.append((op, (tuple(a.shape), hint)))
                        return real(a, *rest, **recipes)

                    return spy

                replace_gemms(monkeypatch, spying)
                dgmoe_ops.fused_moe_inline(*args, layout=layout, **kwargs)
                monkeypatch.undo()
                prepared = torch.nn.Module()
                prepared.w13, prepared.w2 = args[3], args[5]
                plan = plan_warmup(prepared, tokens=[tokens], top_k=2, layouts=layout)
                assert made == [
                    (call.op, ((*call.spec.rows, call.spec.k), call.spec.expected_m or None))
                    for call in plan
                ]


def test_own_weights_are_used_and_cost_nothing(tmp_path) -> None:
    runner = OpRunner(torch.device("cpu"))
    prepared = dgmoe_ops.prepare_weights(
        torch.zeros(4, 256, 256), None, torch.zeros(4, 256, 128), None
    )
    call = plan_warmup(prepared, tokens=[1], top_k=2)[0]
    runner.own = {call.weight: (prepared.w13, prepared.w13_scale)}
    runner(call)
    assert not runner._made

    (layer,) = layers_of(prepared, None, 2, None)
    every = {one.weight: None for one in plan_warmup(prepared, tokens=[300], top_k=2)}
    both = layer_calls(layer, [(300, 300)], Layout("masked"), 128)
    free = max(operand_bytes(one, False) for one in both)
    assert _fit(layer, [(300, 300)], Layout("masked"), 128, every, False, free) == (both, None)
    assert _fit(layer, [(300, 300)], Layout("masked"), 128, {}, False, free)[1].done == 150


def test_other_alignments_are_called_in_their_scope(monkeypatch) -> None:
    seen = []
    shape = LayerShape(2, 128, 64, 1, "bf16")
    real = torch.ops.dgmoe.grouped_gemm_nt_bf16_contig

    def spy(*arguments):
        seen.append((scopes.current().alignment, arguments[0].shape[0] % 64))
        return real(*arguments)

    runner = OpRunner(torch.device("cpu"))
    for alignment in (None, 128, 64):
        (call, _) = plan_warmup(shape, tokens=[3], layouts="contig", alignment=alignment)
        monkeypatch.setattr(torch.ops, "dgmoe", SimpleNamespace(**{call.op: spy}))
        runner(call)
        monkeypatch.undo()
    assert seen == [(None, 0), (None, 0), (64, 0)]


# ---- where it does not run ----


def test_a_cpu_needs_none(capsys) -> None:
    report = warmup(SHAPE, tokens=[1], device="cpu")
    assert report.calls == report.compiled == report.loaded == 0 and report.cache_dir is None
    assert "need no warm-up" in str(report) and "need no warm-up" in capsys.readouterr().err


def test_cuda_without_a_gpu_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="device cuda needs a GPU and a CUDA PyTorch"):
        warmup(SHAPE, tokens=[1])
    with pytest.raises(ValueError, match="device must be cuda or cpu, got meta"):
        warmup(SHAPE, tokens=[1], device="meta")


def test_a_capture_refuses(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="is capturing a graph.*warm up before the capture"):
        run(tmp_path)


# ---- settings ----


def test_where_the_cache_is(monkeypatch, tmp_path) -> None:
    assert jit_cache.configure(None, None) == tmp_path / "default"
    monkeypatch.delenv(jit_cache.FOLDER_VARIABLE)
    assert jit_cache.configure(None, None) == Path.home() / ".deep_gemm"
    monkeypatch.setenv("DGMOE_JIT_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("DGMOE_JIT_NVRTC", "1")
    report = warmup(SHAPE, tokens=[1], runner=lambda call: None)
    assert (
        report.cache_dir == str(tmp_path / "ours") == str(jit_cache.folder())
        and jit_cache.uses_nvrtc()
    )
    report = warmup(SHAPE, tokens=[1], runner=lambda call: None, cache_dir=tmp_path / "given")
    assert report.cache_dir == str(tmp_path / "given") == str(jit_cache.folder())
    # What the backend asks for when it imports the library: the argument, not the variable.
    assert jit_cache.configure(config.jit_cache_dir(), config.jit_nvrtc()) == tmp_path / "given"
    warmup(SHAPE, tokens=[1], runner=lambda call: None, use_nvrtc=False)
    assert config.jit_nvrtc() is False and not jit_cache.uses_nvrtc()
    monkeypatch.setenv("DGMOE_JIT_NVRTC", "perhaps")
    with pytest.raises(ValueError, match="DGMOE_JIT_NVRTC must be one of auto, 1, true"):
        warmup(SHAPE, tokens=[1], runner=lambda call: None)


def test_a_library_that_is_imported_keeps_its_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, jit_cache.LIBRARY, object())
    assert jit_cache.configure(tmp_path / "default", False) == tmp_path / "default"
    with pytest.raises(RuntimeError, match="imported with .*default and now .*other is asked"):
        jit_cache.configure(tmp_path / "other", None)
    with pytest.raises(RuntimeError, match="imported for nvcc: set DG_JIT_USE_NVRTC=1"):
        jit_cache.configure(None, True)
    assert jit_cache.folder() == tmp_path / "default" and not jit_cache.uses_nvrtc()


# ---- the bar ----


@pytest.mark.parametrize("missing", [(), ("rich",), ("rich", "tqdm")])
def test_a_bar_needs_no_library(missing, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name in missing:
        for module in [m for m in sys.modules if m.split(".")[0] == name] + [name]:
            monkeypatch.setitem(sys.modules, module, None)
    steps = []

    class Tqdm:
        def __init__(self, total, desc, file):
            steps.append(total)

        def update(self):
            steps.append(1)

        def close(self):
            pass

    if "tqdm" not in missing:
        monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Tqdm))
    report, compiler = run(tmp_path, tokens=[1, 300])
    assert len(compiler.calls) == report.calls
    assert steps == ([report.calls] + [1] * report.calls if missing == ("rich",) else [])


def test_no_bar_where_none_is_wanted(monkeypatch, tmp_path, capsys) -> None:
    run(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run(tmp_path, progress=False)
    assert capsys.readouterr().err == ""


def test_only_what_the_device_runs_is_warmed_up() -> None:
    (found,) = layers_of(LayerShape(4, 256, 128, 2, "fp8_block"), None, None, None)
    assert legal_layouts(120, found, None, {}, True) == (Layout.CONTIG,)
    assert legal_layouts(100, found, None, {}, True) == tuple(Layout)
    with pytest.raises(ValueError, match="does not run recipe fp8_block in layout masked"):
        legal_layouts(120, found, (Layout.MASKED,), {}, True)
