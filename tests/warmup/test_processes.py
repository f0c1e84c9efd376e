"""Processes that start together on an empty cache, with a compiler that only pretends."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from dgmoe_ops.backends.deep_gemm import jit_cache

GROUPS, KERNELS = 4, 3

# Loads jit_cache.py by itself: it needs no torch, which would take longer than the test.
CHILD = f"""
import importlib.util, json, os, sys, time
from pathlib import Path
path, cache, dies = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "dies"
spec = importlib.util.spec_from_file_location("jit", path)
jit = sys.modules["jit"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jit)
loaded = set()

def log(what, name):
    with open(cache / "log", "a") as file:
        file.write(f"{{what}} {{name}} {{os.getpid()}}\\n")

def run(call):
    name = f"kernel.gemm.{{call[0]}}_{{call[1] % {KERNELS}}}"
    folder = cache / "cache" / name
    if not folder.exists():
        log("start", name)
        time.sleep(0.1)
        if dies and call[1] == 1:
            os._exit(9)
        part = cache / "tmp" / str(os.getpid()) / name
        part.mkdir(parents=True)
        folder.parent.mkdir(exist_ok=True)
        try:
            part.rename(folder)
        except OSError:
            pass
        log("done", name)
    loaded.add(name)

groups = [jit.Group(f"g{{g}}", [(g, c) for c in range({2 * KERNELS})]) for g in range({GROUPS})]
compiled = jit.compile_once(cache, groups, run, timeout=20)
print(json.dumps([compiled, len(loaded)]))
"""


def start(cache: Path, count: int, mode: str = "") -> list[subprocess.Popen]:
    command = [sys.executable, "-c", CHILD, jit_cache.__file__, str(cache), mode]
    return [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]


def results(children: list[subprocess.Popen]) -> list[tuple[int, int]]:
    found = []
    for child in children:
        out, error = child.communicate(timeout=25)
        assert child.returncode == 0, error
        found.append(tuple(json.loads(out)))
    return found


def log(cache: Path) -> collections.Counter:
    lines = [line.split() for line in (cache / "log").read_text().splitlines()]
    return collections.Counter((what, name) for what, name, _ in lines)


def test_eight_processes_compile_each_kernel_once(tmp_path: Path) -> None:
    first = results(start(tmp_path, 8))
    assert set(log(tmp_path).values()) == {1}, log(tmp_path)
    assert len(log(tmp_path)) == 2 * GROUPS * KERNELS
    assert sum(compiled for compiled, _ in first) == GROUPS * KERNELS
    assert {loaded for _, loaded in first} == {GROUPS * KERNELS}, "every process loads every kernel"
    second = results(start(tmp_path, 2))
    assert set(second) == {(0, GROUPS * KERNELS)}
    assert len(log(tmp_path)) == 2 * GROUPS * KERNELS


def test_a_process_that_dies_while_it_compiles_blocks_nobody(tmp_path: Path) -> None:
    (dying,) = start(tmp_path, 1, "dies")
    dying.communicate(timeout=20)
    assert dying.returncode == 9
    before = log(tmp_path)
    assert sum(before.values()) == 3, "one kernel, and one half done"
    found = results(start(tmp_path, 3))
    after = log(tmp_path)
    assert {count for (what, _), count in after.items() if what == "done"} == {1}
    assert sum(count for (what, _), count in after.items() if what == "start") == (
        GROUPS * KERNELS + 1
    )
    assert sum(compiled for compiled, _ in found) == GROUPS * KERNELS - 1  # one was there before


def test_waiting_too_long_names_the_lock(tmp_path: Path) -> None:
    group = jit_cache.Group("g", [1])
    file = jit_cache._lock_file(tmp_path / "dgmoe_ops", group)
    file.parent.mkdir()
    with filelock.FileLock(file), pytest.raises(TimeoutError) as caught:
        started = time.monotonic()
        jit_cache.compile_once(tmp_path, [group], lambda call: None, timeout=0.2)
    assert time.monotonic() - started < 5
    assert str(file) in str(caught.value) and "waited 0.2 s" in str(caught.value)


def test_a_call_that_fails_frees_the_lock_and_leaves_the_group_undone(tmp_path: Path) -> None:
    def fails(call):
        raise RuntimeError("no")

    group = jit_cache.Group("g", [1])
    with pytest.raises(RuntimeError, match="no"):
        jit_cache.compile_once(tmp_path, [group], fails)
    done = []
    jit_cache.compile_once(tmp_path, [group], done.append, timeout=0)
    assert done == [1]


def test_a_finished_group_holds_for_its_identity_only(tmp_path: Path) -> None:
    group = jit_cache.Group("g", [1])
    jit_cache.compile_once(tmp_path, [group], lambda call: None, identity="a")
    held = filelock.FileLock(jit_cache._lock_file(tmp_path / "dgmoe_ops", group))
    with held:
        jit_cache.compile_once(tmp_path, [group], lambda call: None, identity="a", timeout=0)
        with pytest.raises(TimeoutError):
            jit_cache.compile_once(tmp_path, [group], lambda call: None, identity="b", timeout=0)
