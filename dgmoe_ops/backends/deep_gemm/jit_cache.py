"""The GEMM library's cache of compiled kernels: where it is, what is in it, who may add to it.

Stands alone: it imports neither torch nor another part of the package, so that a process that only
compiles need not load them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import filelock

LIBRARY = "deep_gemm"
FOLDER_VARIABLE = "DG_JIT_CACHE_DIR"
NVRTC_VARIABLE = "DG_JIT_USE_NVRTC"
LOCK_TIMEOUT = 1800.0  #: seconds that a process waits for another one to get on
_OURS = (
    "dgmoe_ops"  # the folder in the cache for locks and stamps, and the mark of a counted kernel
)
_POLL_SECONDS = 0.05


class Group(NamedTuple):
    """Calls that may share kernels; calls of two groups never do."""

    key: str
    calls: Sequence


def folder() -> Path:
    """The folder that the library takes, or has taken, from the environment."""
    return _absolute(os.environ.get(FOLDER_VARIABLE) or Path.home() / ".deep_gemm")


def uses_nvrtc() -> bool:
    """Whether the environment asks for NVRTC in place of nvcc."""
    return os.environ.get(NVRTC_VARIABLE, "0") not in ("", "0")


def _absolute(path: str | os.PathLike) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def configure(cache_dir: str | os.PathLike | None, use_nvrtc: bool | None) -> Path:
    """Set the environment that the library reads when it is first used; return its cache folder.

    None leaves a setting as it is.

    Raises:
        RuntimeError: the library is imported already, with another folder or compiler.
    """
    wanted = folder() if cache_dir is None else _absolute(cache_dir)
    loaded = LIBRARY in sys.modules
    if wanted != folder():
        if loaded:
            raise RuntimeError(
                f"dgmoe_ops: cache_dir must be given before {LIBRARY} is imported; it was imported"
                f" with {folder()} and now {wanted} is asked for: set {FOLDER_VARIABLE}={wanted}"
                " for the process, or warm up first"
            )
        os.environ[FOLDER_VARIABLE] = str(wanted)
    if use_nvrtc is not None and use_nvrtc != uses_nvrtc():
        if loaded:
            raise RuntimeError(
                f"dgmoe_ops: use_nvrtc must be given before {LIBRARY} is imported; it was imported"
                f" for {'NVRTC' if uses_nvrtc() else 'nvcc'}: set"
                f" {NVRTC_VARIABLE}={int(use_nvrtc)} for the process, or warm up first"
            )
        os.environ[NVRTC_VARIABLE] = str(int(use_nvrtc))
    return wanted


def kernels(cache: Path) -> set[str]:
    """Names of the compiled kernels in a cache folder."""
    try:
        return {name for name in os.listdir(cache / "cache") if name.startswith("kernel.")}
    except FileNotFoundError:
        return set()


def _claim(cache: Path, name: str) -> bool:
    """Mark a kernel as counted; False where another process has. The mark goes with the kernel."""
    try:
        os.close(os.open(cache / "cache" / name / f"{_OURS}.counted", os.O_CREAT | os.O_EXCL))
    except FileNotFoundError:
        return True  # an injected list need not be folders
    except OSError:
        return False
    return True


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _is_done(stamp: Path, present: set[str]) -> bool:
    """Whether a process has run the whole group, and everything it compiled is still there."""
    try:
        return set(json.loads(stamp.read_text())) <= present
    except (FileNotFoundError, ValueError):
        return False


def _write(stamp: Path, names: Iterable[str]) -> None:
    """Write in one step: a reader, or a process that dies here, leaves no half of it."""
    part = stamp.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(sorted(names)))
    os.replace(part, stamp)


def compile_once(
    cache: Path,
    groups: Iterable[Group],
    run: Callable[[object], object],
    *,
    identity: str = "",
    timeout: float = LOCK_TIMEOUT,
    list_kernels: Callable[[Path], set[str]] = kernels,
) -> int:
    """Run every call of every group, so that over all processes each kernel is compiled once.

    A process compiles a group while it holds the group's lock, and takes up groups that nobody
    holds first: processes that start together share the groups out. A group that some process has
    finished is run without the lock, from the cache, by all others at once. The locks are the
    operating system's, so those of a process that died are free.

    Args:
        cache: the library's cache folder.
        groups: what to run.
        run: runs one call.
        identity: of whatever else kernels depend on (versions, the device); a finished group counts
            for the same identity only.
        timeout: seconds to wait while no group can be taken up.
        list_kernels: names of the kernels in the folder.

    Returns:
        How many kernels were new in the folder after a call of this process that it made while it
        held a lock. No two processes count the same one.

    Raises:
        TimeoutError: another process held a lock for longer than `timeout`.
    """
    ours = cache / _OURS
    ours.mkdir(parents=True, exist_ok=True)
    pending, compiled = list(groups), 0
    deadline = time.monotonic() + timeout
    while pending:
        busy: list[Group] = []
        for group in pending:
            stamp = ours / f"{_digest(identity, group.key, *map(repr, group.calls))}.done"
            lock = filelock.FileLock(_lock_file(ours, group))
            if not _is_done(stamp, list_kernels(cache)):
                try:
                    lock.acquire(timeout=0)
                except filelock.Timeout:
                    busy.append(group)
                    continue
            with contextlib.ExitStack() as held:
                held.callback(lock.release)
                before = list_kernels(cache)
                if _is_done(stamp, before):
                    held.close()  # finished by another process: load beside the others
                    for call in group.calls:
                        run(call)
                else:
                    for call in group.calls:
                        run(call)
                        # At once: who compiled a kernel sees it first, and others count theirs.
                        after = list_kernels(cache)
                        compiled += sum(_claim(cache, name) for name in sorted(after - before))
                        before = after
                    _write(stamp, before)
        if len(busy) < len(pending):
            deadline = time.monotonic() + timeout
        elif time.monotonic() > deadline:
            raise TimeoutError(
                f"dgmoe_ops: waited {timeout:g} s for another process that compiles kernels and"
                f" holds {_lock_file(ours, busy[0])}: give it longer (lock_timeout=), or end it"
            )
        else:
            time.sleep(_POLL_SECONDS)
        pending = busy
    return compiled


def _lock_file(ours: Path, group: Group) -> Path:
    return ours / f"{_digest(group.key)}.lock"
