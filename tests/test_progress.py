"""Showing progress never stops the work, whatever stderr is; a bar that can be shown is."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import dgmoe_ops
from dgmoe_ops import _progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Full(Terminal):
    """A terminal that is gone: writing fails."""

    def write(self, text: str) -> int:
        raise OSError("no space left on device")

    def flush(self) -> None:
        raise OSError("no space left on device")


class Bare:
    """A stream of an embedding program: it takes text and no more."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Broken(Terminal):
    def isatty(self) -> bool:
        raise RuntimeError("what terminal")


def closed() -> io.StringIO:
    stream = Terminal()
    stream.close()
    return stream


STREAMS = {"none": lambda: None, "closed": closed, "full": Full, "bare": Bare, "broken": Broken}


@pytest.mark.parametrize("missing", [(), ("rich",), ("rich", "tqdm")])
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_no_stream_stops_the_work(monkeypatch, stream, missing) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}.console", None)
    out, err = sys.stdout, stream()
    monkeypatch.setattr(sys, "stderr", err)
    done = 0
    with _progress.steps(3, "working", True) as advance:
        for _ in range(4):  # one more than was said
            advance()
            done += 1
    assert done == 4 and sys.stderr is err and sys.stdout is out
    _progress.say("a line")
    if isinstance(err, Bare):
        assert err.text == "a line\n"
    with pytest.raises(KeyError), _progress.steps(3, "working", True) as advance:
        advance()
        raise KeyError("of the work")
    assert sys.stderr is err and sys.stdout is out


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_package_works_without_stderr(monkeypatch, stream) -> None:
    w13, w2 = torch.ones(1, 16, 8), torch.ones(1, 8, 8)
    monkeypatch.setattr(sys, "stderr", stream())
    made = dgmoe_ops.prepare_weights(w13, None, w2, None, "bf16")
    assert made.w13.float().sum() == w13.sum()
    shape = dgmoe_ops.LayerShape(1, 8, 8, 1, "bf16")
    assert "no warm-up" in dgmoe_ops.warmup(shape, tokens=[1], device="cpu").note


def test_a_stream_may_close_during_the_work(monkeypatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with _progress.steps(2, "working", True) as advance:
        advance()
        stream.close()
        advance()
    _progress.say("a line")


def test_say_never_takes_stdout(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    _progress.say("a line")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("library", ["rich", "tqdm"])
def test_a_terminal_has_a_bar(monkeypatch, library) -> None:
    pytest.importorskip(library)
    monkeypatch.setenv("TERM", "xterm")
    if library == "tqdm":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with _progress.steps(7, "counting", True) as advance:
        for _ in range(7):
            advance()
    text = stream.getvalue()
    assert "counting" in text and "7/7" in text


@pytest.mark.parametrize("library", ["rich.progress", "tqdm"])
def test_a_library_that_fails_shows_nothing(monkeypatch, library) -> None:
    class Module:
        def __getattr__(self, name: str):
            raise RuntimeError("half installed")

    if library == "tqdm":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, library, Module())
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _progress.steps(2, "working", True) as advance:
        advance()


@pytest.mark.parametrize(("total", "wanted"), [(0, True), (2, False)])
def test_no_bar(monkeypatch, total, wanted) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with _progress.steps(total, "working", wanted) as advance:
        advance()
    assert stream.getvalue() == ""
