"""What every test shares: the device under test and the hypothesis profile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# An installed package wins over the source tree, which serves a build in place.
sys.path.append(str(Path(__file__).parent.parent))

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "ci", derandomize=True, max_examples=25, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "fuzz", max_examples=2000, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile(os.environ.get("DGMOE_HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the ops under test run (default: cpu)",
    )


def _share_the_cores() -> None:
    """Give each worker of pytest-xdist its part of the cores, not as many threads as there are."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of processes that tests start


def pytest_configure(config: pytest.Config) -> None:
    _share_the_cores()
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"--device cuda needs a GPU and a CUDA PyTorch; torch {torch.__version__} sees none"
        )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that the ops under test run on."""
    return torch.device(request.config.getoption("--device"))


#: ops that run on GPUs of at least this compute capability only
LEAST_MAJOR = {"gemm_nt_mxfp8_f8f8bf16": 10}


@pytest.fixture(autouse=True)
def _skip_where_the_op_does_not_run(request: pytest.FixtureRequest) -> None:
    """Skip tests of an op, named by a parameter or by their module, that call it on such a GPU."""
    if "device" not in request.fixturenames or request.getfixturevalue("device").type != "cuda":
        return
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    for name in (parameters.get("name"), getattr(request.module, "NAME", None)):
        least = LEAST_MAJOR.get(name, 0)
        if torch.cuda.get_device_capability()[0] < least:
            pytest.skip(f"dgmoe::{name} needs a GPU of compute capability {least}.0")
