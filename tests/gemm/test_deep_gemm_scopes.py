"""Scopes over the library's process-global switches, overlap, direct calls and the sanity mode."""

import threading

import pytest
import torch
from deep_gemm_stand_in import F8_CONTIG, F8_MASKED, Library, request
from deep_gemm_stand_in import pretend as pretend

import dgmoe_ops
from dgmoe_ops.backends import deep_gemm as backend
from dgmoe_ops.backends import scopes
from dgmoe_ops.backends.deep_gemm import library as adapter
from dgmoe_ops.backends.deep_gemm import native
from dgmoe_ops.backends.deep_gemm.native import Argument
from dgmoe_ops.backends.request import OPS
from dgmoe_ops.formats.layouts import ScaleLayout

MASKED, CONTIG = "m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_gemm_nt_contiguous"


class Switched(Library):
    """A library with switches, which keeps what they were at each call."""

    def __init__(self, *names, error=None):
        super().__init__(*names)
        self.values = {"num_sms": 132, "pdl": False, "mk_alignment_for_contiguous_layout": 128}
        self.seen = []
        for name in self.values:
            setattr(self, f"get_{name}", lambda name=name: self.values[name])
            setattr(self, f"set_{name}", lambda value, name=name: self.values.update({name: value}))

        def call(*args, **kwargs):
            self.seen.append((threading.get_ident(), dict(self.values)))
            if error is not None:
                raise error

        for name in names:
            setattr(self, name, call)


def test_switches_hold_for_the_call_and_are_put_back(pretend):
    library = pretend(Switched(MASKED))
    before = dict(library.values)
    with dgmoe_ops.num_sms(100), dgmoe_ops.pdl(True):
        assert library.values == before  # only around calls
        backend.run(request())
        assert library.values == before
        with dgmoe_ops.num_sms(64):
            backend.run(request())
        backend.run(request())
    backend.run(request())
    assert [(v["num_sms"], v["pdl"]) for _, v in library.seen] == [
        (100, True),
        (64, True),
        (100, True),
        (132, False),
    ]


def test_an_error_puts_the_switches_back(pretend):
    library = pretend(Switched(MASKED, error=RuntimeError("no")))
    before = dict(library.values)
    with pytest.raises(RuntimeError, match="^no$"), dgmoe_ops.num_sms(7):
        backend.run(request())
    assert library.values == before and scopes.current() == scopes.Settings()


def test_threads_do_not_see_each_others_scopes(pretend):
    library = pretend(Switched(MASKED))
    backend.run(request())
    barrier = threading.Barrier(3)
    failures = []

    def work(count):
        try:
            barrier.wait()
            for _ in range(20):
                if count is None:
                    backend.run(request())
                else:
                    with dgmoe_ops.num_sms(count):
                        backend.run(request())
        except Exception as error:
            failures.append(error)

    wanted = {}
    threads = [threading.Thread(target=work, args=(count,)) for count in (10, 20, 30)]
    for thread, count in zip(threads, (10, 20, 30), strict=True):
        thread.start()
        wanted[thread.ident] = count
    for thread in threads:
        thread.join()
    assert not failures and len(library.seen) == 61
    for ident, values in library.seen[1:]:
        assert values["num_sms"] == wanted[ident]
    assert library.values["num_sms"] == 132


def test_alignment_by_architecture(pretend):
    library = pretend(Switched(CONTIG), 10)
    with dgmoe_ops.contiguous_alignment(32):
        backend.run(request(F8_CONTIG, ScaleLayout.PACKED_UE8M0, m=96))
    assert library.seen[-1][1]["mk_alignment_for_contiguous_layout"] == 32
    with pytest.raises(ValueError, match="multiple of 64 rows"), dgmoe_ops.contiguous_alignment(64):
        backend.run(request(F8_CONTIG, ScaleLayout.PACKED_UE8M0, m=96))
    pretend(Switched(CONTIG))
    with (
        pytest.raises(ValueError, match="alignment must be one of 128 on SM90, got 64"),
        dgmoe_ops.contiguous_alignment(64),
    ):
        backend.run(request(F8_CONTIG))


@pytest.mark.parametrize("op", [F8_MASKED, "grouped_gemm_nt_bf16_masked", "gemm_nt_f8f8bf16"])
@pytest.mark.parametrize("arch_major", [9, 10])
def test_the_alignment_of_segments_reaches_no_other_gemm(pretend, op, arch_major):
    """A masked GEMM would take it for the height of its tiles, which a slab is no multiple of."""
    library = pretend(Switched(*adapter.FUNCTION_NAMES[op]), arch_major)
    form = ScaleLayout.MN_MAJOR if arch_major == 9 else ScaleLayout.PACKED_UE8M0
    with dgmoe_ops.contiguous_alignment(96), dgmoe_ops.num_sms(8):
        backend.run(request(op, form, m=256))
    values = library.seen[-1][1]
    assert values["mk_alignment_for_contiguous_layout"] == 128 and values["num_sms"] == 8


def test_a_library_without_the_switch(pretend):
    pretend(Library(MASKED))
    with pytest.raises(RuntimeError, match="has no set_pdl"), dgmoe_ops.pdl(True):
        backend.run(request())


@pytest.mark.parametrize(
    ("scope", "value", "text"),
    [
        (dgmoe_ops.num_sms, 0, "count must be at least 1, got 0"),
        (dgmoe_ops.num_sms, True, "count must be at least 1, got True"),
        (dgmoe_ops.contiguous_alignment, 100, "rows must be 32, 64, 96 or 128, got 100"),
        (dgmoe_ops.pdl, 1, "enabled must be True or False, got 1"),
    ],
)
def test_scopes_check_their_argument(scope, value, text):
    with pytest.raises(ValueError, match=text):
        scope(value)


# ---- overlap ----


def test_overlap_is_refused_with_the_reason(pretend):
    library = Library(MASKED)
    library.m_grouped_fp8_gemm_nt_masked = lambda a, b, d, masked_m, expected_m: None
    pretend(library)
    signal = torch.zeros(4, dtype=torch.int32)
    match = "not available: .* of sgl-deep-gemm .* takes no enable_overlap, max_block_n, signal"
    with pytest.raises(RuntimeError, match=match), dgmoe_ops.down_gemm_overlap(signal):
        pass


def test_overlap_where_the_library_takes_it(pretend):
    library = Library(CONTIG)
    got = {}

    def masked(a, b, d, masked_m, expected_m, enable_overlap=False, max_block_n=256, signal=None):
        got.update(enable_overlap=enable_overlap, max_block_n=max_block_n, signal=signal)
        return 64, 3

    library.m_grouped_fp8_gemm_nt_masked = masked
    pretend(library)
    signal = torch.zeros(4, dtype=torch.int32)
    with dgmoe_ops.down_gemm_overlap(signal, max_block_n=160) as told:
        backend.run(request())
        backend.run(request("gemm_nt_bf16bf16f32"))  # no grouped GEMM: nobody waits for it
    assert got == {"enable_overlap": True, "max_block_n": 160, "signal": signal}
    assert told.result == (64, 3)
    backend.run(request())
    assert not got["enable_overlap"] and not scopes.overlap_active()


@pytest.mark.parametrize("op", [op for op in OPS if op.startswith("grouped") and op != F8_MASKED])
def test_a_grouped_gemm_that_would_not_signal_is_refused(pretend, op):
    """Whoever waits for its tiles would wait for ever."""
    library = Library()
    library.m_grouped_fp8_gemm_nt_masked = lambda *a, enable_overlap, max_block_n, signal: None
    pretend(library)
    match = f"dgmoe::{op}: overlap of the down GEMM is not available: this GEMM on SM90 would never"
    signal = torch.zeros(4, dtype=torch.int32)
    with dgmoe_ops.down_gemm_overlap(signal), pytest.raises(RuntimeError, match=match):
        backend.run(request(op))
    assert not library.calls


def test_no_direct_call_passes_an_overlap_by(pretend, monkeypatch):
    """A bound op would go to the library without the scope's arguments."""
    told = []
    monkeypatch.setattr(scopes, "tell_native", lambda entered, settings: told.append(entered))
    library = Library(CONTIG)
    library.m_grouped_fp8_gemm_nt_masked = lambda *a, enable_overlap, max_block_n, signal: None
    pretend(library)
    with dgmoe_ops.down_gemm_overlap(torch.zeros(4, dtype=torch.int32)):
        assert told == [1]
    assert told == [1, -1]


def test_overlap_checks_its_arguments():
    with pytest.raises(ValueError, match="signal must be contiguous int32"):
        dgmoe_ops.down_gemm_overlap(torch.zeros(4)).__enter__()
    with pytest.raises(ValueError, match="max_block_n must be a positive multiple of 8, got 12"):
        dgmoe_ops.down_gemm_overlap(torch.zeros(4, dtype=torch.int32), 12).__enter__()


# ---- direct calls: what a release's wrapper passes on is recorded ----

WRAPPERS = """
def masked(a, b, d, masked_m, expected_m, recipe=None, compiled_dims='nk', cast=False):
    (a, a_sf), (b, b_sf) = a, b
    return _C.grouped_masked(a, a_sf, b, b_sf, d, masked_m, expected_m, recipe, compiled_dims, cast)

def prenorm(a, b, d, sqr_sum, num_splits=None):
    _C.prenorm(a, b, d, sqr_sum, num_splits)

def odd(a, b, d, masked_m, expected_m):
    _C.odd(a[0], 3.5)

def twice(a, b, d, masked_m, expected_m):
    _C.one(a[0])
    _C.two(a[0])

def fails(a, b, d, masked_m, expected_m):
    raise ValueError(a)
"""


def wrapper(name):
    scope = {"_C": None}
    exec(WRAPPERS, scope)
    return scope[name]


def recorded(name, made):
    from dgmoe_ops.backends.deep_gemm.library import arguments

    return native.record(wrapper(name), *arguments(native.stand_ins(made)))


def test_a_wrapper_is_recorded():
    A = Argument
    assert recorded("masked", request()) == (
        "grouped_masked",
        [A.A, A.A_SCALE, A.B, A.B_SCALE, A.D, A.INFO, A.EXPECTED_M, A.NONE, A.NK_TEXT, A.FALSE],
    )
    assert recorded("prenorm", request("tf32_hc_prenorm_gemm")) == (
        "prenorm",
        [A.A, A.B, A.D, A.SQR_SUM, A.NUM_SPLITS],
    )


@pytest.mark.parametrize("name", ["odd", "twice", "fails"])
def test_what_cannot_be_recorded_goes_through_python(name):
    assert recorded(name, request()) is None


def test_builtin_functions_are_not_recorded():
    assert native.record(len, (), {}) is None
    assert native.record(lambda a: a, (1,), {}) is None


def test_the_two_sides_number_alike():
    """The enumerations of C++ stand in the order of those of Python."""
    import re
    from pathlib import Path

    folder = Path(__file__).parents[2] / "csrc" / "gemm"
    text = "".join((folder / "deep_gemm" / f"deep_gemm.{end}").read_text() for end in ("cu", "cuh"))

    def names(enum):
        body = re.search(rf"enum class {enum} : int64_t {{(.*?)}};", text, re.S)[1]
        return re.findall(r"k(\w+)", body)

    def camel(name):
        return "".join(part.capitalize() for part in name.split("_"))

    assert names("Argument") == [camel(a.name) for a in Argument]
    assert len(names("DeepGemmOp")) == len(OPS) == int(re.search(r"kDeepGemmOps = (\d+)", text)[1])
    for name, op in zip(names("DeepGemmOp"), OPS, strict=True):
        source = (folder / f"{op}.cu").read_text()
        assert f"DeepGemmOp::k{name}" in source and f'"{op}"' in source


# ---- sanity ----


@pytest.fixture
def sane(monkeypatch):
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "1")


def test_contents_are_not_looked_at_by_default(pretend):
    library = pretend(Library(CONTIG))
    mixed = torch.arange(256, dtype=torch.int32) % 2
    backend.run(request(F8_CONTIG, m=256, info=mixed))
    assert library.calls


def test_m_indices_are_looked_at_in_blocks(pretend, sane):
    library = pretend(Library(CONTIG))
    good = torch.full((256,), -1, dtype=torch.int32)
    good[:100] = 1
    good[128:130] = 0
    backend.run(request(F8_CONTIG, m=256, info=good))
    assert library.calls
    calls = len(library.calls)
    mixed = good.clone()
    mixed[120] = 0
    with pytest.raises(ValueError, match=r"one expert in each .*block.* got 0 at \[120\] after 1"):
        backend.run(request(F8_CONTIG, m=256, info=mixed))
    late = good.clone()
    late[:5] = -1
    with pytest.raises(ValueError, match=r"front of its padding, got 1 at \[5\] after -1"):
        backend.run(request(F8_CONTIG, m=256, info=late))
    assert len(library.calls) == calls


def test_exponents_are_looked_at_where_the_tensor_core_takes_them(pretend, sane):
    pretend(Library(*(MASKED, CONTIG)), 10)
    counts = torch.tensor([1, 0], dtype=torch.int32)
    made = request(F8_MASKED, ScaleLayout.PACKED_UE8M0, info=counts)
    backend.run(made)
    made.operands.a_scale[1] = 0  # no expert's tile: never read
    made.operands.a_scale[0, :, 0] = 0x00007F7F  # past the last group
    backend.run(made)
    made.operands.a_scale[0, 5, 0] = 0x7F7FFF7F  # a NaN exponent in the second group
    match = r"a_scale must hold positive powers of two .* got exponent byte 255 at \[0, 5, 1\]"
    with pytest.raises(ValueError, match=match):
        backend.run(made)
    made.operands.a_scale[0, 5, 0] = 0x7F7F7F7F
    made.operands.b_scale[1, 3, 0] = 0x7F7F7F00
    with pytest.raises(ValueError, match=r"b_scale must .* got exponent byte 0 at \[1, 3, 0\]"):
        backend.run(made)
    pretend(Library(MASKED))
    backend.run(request(a_scale=request().operands.a_scale.fill_(3.3)))  # SM90 takes any fp32 scale
