"""Shared fixtures. Tests on real images skip, visibly, where the data folder is absent."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

# The problems of tests are small, and several processes may share the cores: more threads would only spin.
# Numpy and torch read this when they load, and so do the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores Ctrl-C for what it starts in the background, and all that is started there inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


def _data(name: str) -> Path:
    folder = Path(os.environ.get("NCM_TEST_DATA", ROOT.parent / "shared" / "data")) / name
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set NCM_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """MNIST's four IDX files."""
    return _data("mnist")


@pytest.fixture(scope="session")
def pacs_dir() -> Path:
    """A sample of PACS, ``domain/class/file``."""
    return _data("pacs100")


@pytest.fixture(scope="session")
def effnet_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet weights of timm's ``tf_efficientnet_lite0`` as a .safetensors file, made once a session."""
    specification = importlib.util.spec_from_file_location(
        "fixtures_effnet", ROOT / "tests" / "fixtures_effnet.py"
    )
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("effnet")
    path: Path = module.save_checkpoint(folder / "tf_efficientnet_lite0.safetensors")
    return path
