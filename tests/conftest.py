"""Shared fixtures. Tests on real images skip, visibly, where the data folder is absent."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The problems of tests are small, and several processes may share the cores: more threads would only spin.
# Numpy and torch read this when they load, and so do the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores Ctrl-C for what it starts in the background, and all that is started there inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tests.world import World, make_world  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _results_are_read_again() -> Iterator[None]:
    """Every result that a test has ncm write is read again: its schema takes what is written."""
    from ncm_cli.store import files

    write = files.write_document

    def written(path: Path | str, form: str, *args: Any) -> None:
        write(path, form, *args)
        if form == files.RESULT_FORMAT:
            files.read_result(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_document", written)
        yield


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
    from tests.fixtures_effnet import save_checkpoint

    folder = tmp_path_factory.mktemp("effnet")
    return save_checkpoint(folder / "tf_efficientnet_lite0.safetensors")


@pytest.fixture(scope="session")
def text_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small open_clip model that reads texts, with seeded random weights."""
    import open_clip
    from safetensors.torch import save_file

    from ncm_cli.images.clip_model import quiet_root_logger
    from ncm_cli.solvers.device import own_random_numbers

    folder = tmp_path_factory.mktemp("text") / "clip"
    folder.mkdir()
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16}
    text = {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with own_random_numbers(3), quiet_root_logger():
        made = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    save_file(made.state_dict(), folder / "open_clip_model.safetensors")
    return folder


class WebHandler(http.server.SimpleHTTPRequestHandler):
    """A folder with its indexes; unlike the library's it answers with ranges."""

    def send_head(self) -> Any:
        """The file or the part of it that is asked for."""
        found, asked = super().send_head(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or asked is None:
            return found
        with found:
            data = found.read()
        return io.BytesIO(data[int(asked[1]) : int(asked[2]) + 1])

    def send_response(self, code: int, message: str | None = None) -> None:
        """The status, which is another one for a part."""
        super().send_response(206 if code == 200 and "Range" in self.headers else code, message)

    def send_header(self, keyword: str, value: str) -> None:
        """The length is told for the whole only."""
        if not ("Range" in self.headers and keyword == "Content-Length"):
            super().send_header(keyword, value)

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Serves the test's folder, or what a handler of its own does, and gives the address."""
    pytest.importorskip("aiohttp")
    running = []

    def start(handler: type[WebHandler] = WebHandler) -> str:
        made = functools.partial(handler, directory=str(tmp_path))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), made)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """Any number of worlds, each in its own folder: for property tests."""

    def make(seed: int = 0) -> World:
        return make_world(tmp_path_factory.mktemp("world"), seed)

    return make
