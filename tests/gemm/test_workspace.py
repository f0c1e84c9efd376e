"""The `workspace=` of the fp8 grouped GEMMs: what is refused, and that a given one is used."""

from __future__ import annotations

import pytest
import torch
from helpers import misaligned, refused, strided
from mx_operands import LAYOUTS, RECIPES, Product, mn_major

import dgmoe_ops
from dgmoe_ops.reference.scale import pack_words
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.samples import SAMPLES

NAMES = ("grouped_gemm_nt_f8f8bf16_masked", "grouped_gemm_nt_f8f8bf16_contig")
each_op = pytest.mark.parametrize("name", NAMES)


def packet(name: str):
    return getattr(torch.ops.dgmoe, name)


def tiny(name: str, device) -> tuple[dict, torch.Tensor]:
    """A small call with its arguments by name, and its result."""
    args, kwargs = SAMPLES[name].tiny(device)
    names = [argument.name for argument in packet(name).default._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    return named, packet(name)(**named)


def room(device, size: int = 4096, dtype=torch.uint8) -> torch.Tensor:
    return torch.full((size,), 77, dtype=dtype, device=device)


@each_op
def test_a_workspace_changes_no_bit(name, device) -> None:
    named, wanted = tiny(name, device)
    mask = dgmoe_ops.reference.defined(name)(**named)[0]
    for dtype in (torch.uint8, torch.int8):
        workspace = room(device, dtype=dtype)
        got = getattr(dgmoe_ops.ops, name)(**named, workspace=workspace)
        compare.assert_bits(name, got, wanted, mask)
        out = torch.full_like(wanted, float("nan"))
        got = getattr(dgmoe_ops.ops, name)(**named, out=out, workspace=room(device))
        assert got is out
        compare.assert_bits(name, got, wanted, mask)


@each_op
def test_bad_workspaces_are_refused(name, device) -> None:
    named, wanted = tiny(name, device)
    good = room(device)
    bad = [good.float(), good[None], good[0], strided(good), misaligned(good)]
    if device.type != "cpu":
        bad.append(good.cpu())
    for workspace in bad:
        given = {"out": torch.full_like(wanted, float("nan"))}
        with refused(name, "workspace"):
            packet(name).out(**named, **given, workspace=workspace)
        assert given["out"].isnan().all()


@each_op
def test_a_workspace_over_another_tensor_is_refused(name, device) -> None:
    named, wanted = tiny(name, device)
    given = {"out": torch.full_like(wanted, float("nan"))}
    tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
    for tensor in (*tensors, given["out"]):
        storage = torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage())
        with refused(name, "workspace"):
            packet(name).out(**named, **given, workspace=storage)


@each_op
def test_a_compiled_call_keeps_to_what_it_writes(name, device) -> None:
    """The graph knows that the workspace is written, and functionalises the call."""
    named, wanted = tiny(name, device)
    schema = packet(name).out._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info]
    assert written == ["out", "workspace"] and not schema.returns
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(named, out, workspace):
        packet(name).out(**named, out=out, workspace=workspace)
        return out + 0

    given = {"out": torch.full_like(wanted, float("nan"))}
    mask = dgmoe_ops.reference.defined(name)(**named)[0]
    compare.assert_bits(name, call(named, given["out"], room(device)), wanted, mask)


@each_op
def test_opcheck_of_the_out_overload(name, device) -> None:
    """Functionalised too; test_schema knows no fp8 (see the contract test)."""
    named, wanted = tiny(name, device)
    given = {"out": torch.empty_like(wanted), "workspace": room(device)}
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(packet(name).out, (), named | given, test_utils=utils)


# ---- on SM90 ----


@pytest.fixture
def hopper(device):
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("runs with --device cuda on an SM90 GPU")
    return device


def call_of(recipe: str, layout: str, expected_m: int, device):
    """The op's arguments, and the bytes that it wants."""
    made = Product(recipe, layout, [40, 0, 20, 1, 300, 128], 200, 640, expected_m)
    scales = [mn_major(pack_words(byte), device) for byte in (made.a_byte, made.b_byte)]
    a, b, where = (x.to(device) for x in (made.a, made.b, made.where))
    hint = [expected_m] if layout == "masked" else []
    recipes = dict(zip(("recipe_a", "recipe_b"), RECIPES[recipe], strict=True))
    m = a.shape[-2]
    size = dgmoe_ops.ops.grouped_gemm_workspace_bytes(
        layout, 6, m, 200, 640, expected_m=expected_m, **recipes, fp4=made.fp4, arch=90
    )
    return made, (a, scales[0], b, scales[1], where, *hint), recipes, size


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("expected_m", [50, 384])
def test_a_given_workspace_is_all_that_is_used(recipe, layout, expected_m, hopper) -> None:
    made, args, recipes, size = call_of(recipe, layout, expected_m, hopper)
    assert size > 0
    run = getattr(dgmoe_ops.ops, f"grouped_gemm_nt_f8f8bf16_{layout}")
    wanted = run(*args, **recipes)
    storage = room(hopper, size + 256)
    workspace, out = storage[128 : 128 + size], torch.empty_like(wanted)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run(*args, **recipes, out=out, workspace=workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    valid = made.valid.to(hopper)
    assert torch.equal(out[valid].view(torch.int16), wanted[valid].view(torch.int16))
    assert (storage[:128] == 77).all() and (storage[128 + size :] == 77).all()
    with pytest.raises(ValueError, match=f"workspace must have at least {size} bytes for sm90_mx"):
        run(*args, **recipes, out=out, workspace=workspace[: size - 1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_allocated_is_what_is_said(layout, hopper) -> None:
    _, args, recipes, size = call_of("mxfp4", layout, 384, hopper)
    run = getattr(dgmoe_ops.ops, f"grouped_gemm_nt_f8f8bf16_{layout}")
    out = run(*args, **recipes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*args, **recipes, out=out)
    assert torch.cuda.max_memory_allocated() - before == -(-size // 512) * 512
