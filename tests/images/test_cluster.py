"""``ncm embed --cluster`` on several nodes of one machine makes the store of one process, whatever ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError, MismatchError, NcmError, UsageError
from ncm_cli.images.embed import embed
from ncm_cli.images.nodes import Cluster
from ncm_cli.main import run
from ncm_cli.progress import Task
from ncm_cli.ray_cluster import ClusterNode
from ncm_cli.recipes.freshness import NEUTRAL
from ncm_cli.store.journal import journal_folder
from tests.world import Heard

from .conftest import Pictures, contents

OPTIONS = {"batch_size": "8", "model": "pixels:4", "workers": "1", "cpus": 1}


class Nodes:
    """A cluster whose head gives no cores, and nodes of one core each that come and go."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        # By default it takes Ray half a minute to notice that a node has gone.
        health = {"initial_delay_ms": 3000, "period_ms": 500, "failure_threshold": 4}
        soon = {f"health_check_{name}": value for name, value in health.items()}
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": soon}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.alive: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int = 1, *, startup: str = "", **environment: str) -> Any:
        """A node; its processes have the environment, and run ``startup`` before anything else."""
        if startup:
            folder = self._folder / f"startup{len(list(self._folder.iterdir()))}"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(startup)
            environment["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        for left in (2, 1, 0):
            try:
                self.alive.append(self._cluster.add_node(num_cpus=cpus, env_vars=environment or None))
                break
            except Exception as error:  # Ray's own limit of 30 s, on a busy machine
                if not left or "timed out during startup" not in str(error):
                    raise
        return self.alive[-1]

    def kill(self, node: Any) -> None:
        self.alive.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def clear(self) -> None:
        for node in list(self.alive):
            self.kill(node)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    # Ray 2.40 ended a driver, and so the tests, together with another node of the same machine, now and then.
    pytest.importorskip(
        "ray", minversion="2.60", reason="an older Ray ends a driver with another node of its machine"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        nodes = Nodes(tmp_path_factory.mktemp("nodes"))
        yield nodes
        nodes.close()


@pytest.fixture
def nodes(_cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for module in ("images.nodes", "recipes.cluster"):
        monkeypatch.setattr(f"ncm_cli.{module}.LOOK_SECONDS", 0.3)
    yield _cluster
    _cluster.clear()


class Watched(Heard):
    """Calls ``at`` with the number of images that are done."""

    def __init__(self, at: Callable[[int], None]) -> None:
        super().__init__()
        self._at = at

    @contextlib.contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "rows") -> Iterator[Task]:
        watched, done = Task(), 0

        def advance(n: int = 1) -> None:
            nonlocal done
            done += n
            self._at(done)

        if label == "embedding":
            watched.advance = advance  # type: ignore[method-assign]
        yield watched


def clean(pictures: Pictures, **changes: Any) -> dict[str, Any]:
    """What one process makes."""
    output = pictures.folder / "one.h5"
    given = {name: value for name, value in OPTIONS.items() if name != "cpus"} | changes
    pictures.embed(output=output, **given)
    return contents(output)


def on(nodes: Nodes, pictures: Pictures, at: Callable[[int], None] | None = None, **changes: Any) -> Any:
    """The report of a run on the cluster, and what it said."""
    said = Watched(at or (lambda done: None))
    given: dict[str, Any] = OPTIONS | {"cluster": nodes.address} | changes
    return embed(pictures.options(**given), reporter=said), said


def once(done: int, action: Callable[[], None]) -> Callable[[int], None]:
    """Does something when so many images are done."""
    acted = []

    def at(now: int) -> None:
        if now >= done and not acted:
            acted.append(now)
            action()

    return at


def test_nodes_make_the_store_of_one_process_and_a_killed_one_loses_nothing(
    nodes: Nodes, make_pictures: Any
) -> None:
    pictures = make_pictures(200)
    (pictures.folder / "2.png").write_bytes(b"no image")
    expected = clean(pictures, max_failures=1)
    first = nodes.add()
    nodes.add()
    report, said = on(nodes, pictures, once(40, lambda: nodes.kill(first)), max_failures=1)
    assert contents(pictures.output) == expected
    assert report.content_sha256 == expected["content"] and len(report.failed) == 1
    assert any("2 cores" in note for note in said.notes)
    assert not journal_folder(pictures.output).exists()


SLOW = """
import time
from ncm_cli.images import pixels
encode = pixels.PixelsEncoder.encode
pixels.PixelsEncoder.encode = lambda self, items: time.sleep(.05) or encode(self, items)
"""

DEADLY = """
import os
from ncm_cli.images import reading
fetch = reading.fetch_image
reading.fetch_image = lambda file: os.kill(os.getpid(), 9) if file.path.endswith("/13.png") else fetch(file)
"""


def without(folder: Path) -> str:
    """A node's startup that hides a folder."""
    return f"""
import os
stat, missing = os.stat, FileNotFoundError(2, "No such file or directory")
def hiding(path, *more, **options):
    if str(path).startswith({str(folder)!r}):
        raise missing
    return stat(path, *more, **options)
os.stat = hiding
"""


@pytest.mark.slow
def test_two_nodes_are_killed_and_one_is_added(nodes: Nodes, make_pictures: Any) -> None:
    pictures = make_pictures(400)
    expected = clean(pictures)
    first, second = nodes.add(startup=SLOW), nodes.add(startup=SLOW)
    killed, added = once(80, lambda: nodes.kill(first)), once(120, nodes.add)
    last = once(240, lambda: nodes.kill(second))
    report, said = on(nodes, pictures, lambda done: [act(done) for act in (killed, added, last)] and None)
    assert contents(pictures.output) == expected
    assert any("has joined" in note for note in said.notes)
    assert report.device.endswith("nodes (cpu)")


@pytest.mark.slow
def test_a_network_gives_the_bits_of_one_process(nodes: Nodes, make_pictures: Any, tiny_clip: Any) -> None:
    pictures = make_pictures(40)
    model = {"model": str(tiny_clip.config), "pretrained": str(tiny_clip.safetensors), "normalize": True}
    expected = clean(pictures, **model)
    nodes.add(2)
    report, _ = on(nodes, pictures, **model)
    assert contents(pictures.output) == expected
    again, said = on(nodes, pictures, **model)
    assert not again.written and again.content_sha256 == report.content_sha256
    assert not any("loading" in note for note in said.notes)


@pytest.mark.slow
def test_a_killed_driver_goes_on(nodes: Nodes, make_pictures: Any) -> None:
    pictures = make_pictures(400)
    expected = clean(pictures)
    for _ in range(2):
        nodes.add(startup=SLOW)
    driver = started(nodes, pictures)
    log = journal_folder(pictures.output) / "rows.log"
    wait_for(lambda: log.exists() and log.stat().st_size > 20_000)
    driver.kill()
    driver.wait()
    assert not pictures.output.exists()
    _, said = on(nodes, pictures)
    assert contents(pictures.output) == expected
    assert any("going on after an interrupted run" in note for note in said.notes)


def started(nodes: Nodes, pictures: Pictures) -> subprocess.Popen[bytes]:
    """The command, as a process of its own."""
    line = [sys.executable, "-m", "ncm_cli", "embed", str(pictures.manifest), "-o", str(pictures.output)]
    line += ["--cluster", nodes.address, *(f"--{k.replace('_', '-')}={v}" for k, v in OPTIONS.items())]
    return subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_at_random_moments_nothing_is_lost_or_doubled(nodes: Nodes, make_pictures: Any) -> None:
    """NCM_CLUSTER_ROUNDS=20 kills at more moments."""
    pictures = make_pictures(400)
    expected = clean(pictures)
    rng, events = random.Random(int(os.environ.get("NCM_CLUSTER_SEED", "0"))), dict.fromkeys("nd", 0)
    for _ in range(int(os.environ.get("NCM_CLUSTER_ROUNDS", "1"))):
        pictures.output.unlink(missing_ok=True)
        nodes.clear()
        for _ in range(3):
            nodes.add(startup=SLOW)
        driver = started(nodes, pictures)
        log = journal_folder(pictures.output) / "rows.log"
        wait_for(lambda log=log: log.exists() and log.stat().st_size > 0)  # type: ignore[misc]
        for event in rng.choices("nnd", k=3):
            time.sleep(rng.uniform(0, 1.5))
            if event == "d":
                driver.kill()
                events["d"] += driver.wait() == -signal.SIGKILL
                driver = started(nodes, pictures)
            else:
                events["n"] += driver.poll() is None
                nodes.kill(rng.choice(nodes.alive))
                if len(nodes.alive) < 2:
                    nodes.add(startup=SLOW)
        assert driver.wait(timeout=120) == 0
        made = contents(pictures.output)
        assert made == expected
        assert len(set(made["ids"])) == len(made["ids"]) == 400
        assert not journal_folder(pictures.output).exists()
        print(f"killed while at work: {events['n']} nodes, {events['d']} drivers", flush=True)
    assert events["n"] and events["d"]


@pytest.mark.slow
def test_pictures_that_a_node_cannot_read_are_sent_to_it(nodes: Nodes, make_pictures: Any) -> None:
    pictures = make_pictures(120)
    (pictures.folder / "5.png").write_bytes(b"no image")
    expected = clean(pictures, max_failures=2)
    nodes.add(startup=without(pictures.folder))
    report, said = on(nodes, pictures, max_failures=2)
    assert contents(pictures.output) == expected and report.new == 119
    assert sum("its pictures are sent to it" in note for note in said.notes) == 1


@pytest.mark.slow
def test_a_picture_that_goes_meanwhile_fails_as_in_one_process(nodes: Nodes, make_pictures: Any) -> None:
    pictures = make_pictures(120)
    nodes.add(startup=SLOW)
    report, said = on(nodes, pictures, once(8, (pictures.folder / "110.png").unlink), max_failures=1)
    assert [(row.id, row.reason) for row in report.failed] == [("x110", "no such file")]
    assert report.rows == 119 and not any("sent to it" in note for note in said.notes)


@pytest.mark.slow
def test_masks_that_a_node_cannot_read_are_an_error(nodes: Nodes, make_pictures: Any) -> None:
    from PIL import Image

    pictures = make_pictures(12)
    masks = pictures.folder / "masks"
    masks.mkdir()
    shape = np.zeros((8, 8), np.uint8)
    shape[2:6, 2:6] = 255
    for row in pictures.rows:
        Image.fromarray(shape).save(masks / f"{row['id']}.png")
    nodes.add(startup=without(masks))
    asked = {"augment": "background", "masks": masks, "fill": "grey"}
    with pytest.raises(InputError, match="or their masks") as caught:
        on(nodes, pictures, **asked)
    assert "node " in str(caught.value.where)
    expected = clean(pictures, **asked)
    nodes.clear()
    nodes.add()
    on(nodes, pictures, **asked)
    assert contents(pictures.output) == expected


def snapshot(hub: Path, seed: int) -> Path:
    """A cache of Hugging Face with one small model, of random weights."""
    import timm
    from safetensors.torch import save_file

    from ncm_cli.solvers.device import own_random_numbers

    model = hub / "models--timm--test_resnet.r160_in1k"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    with own_random_numbers(seed):
        network = timm.create_model("test_resnet")
    save_file(network.state_dict(), model / "snapshots" / "abc" / "model.safetensors")
    return hub


@pytest.mark.slow
def test_a_node_with_other_weights_is_named(
    nodes: Nodes, make_pictures: Any, offline: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pictures = make_pictures(12)
    asked = {"model": "timm:test_resnet", "pretrained": "r160_in1k", "batch_size": "4"}
    snapshot(offline, 1)
    expected = clean(pictures, **asked)
    home = tmp_path_factory.mktemp("same")
    (home / "hub").symlink_to(offline)
    nodes.add(HF_HOME=str(home), HF_HUB_OFFLINE="1")
    on(nodes, pictures, **asked)
    assert contents(pictures.output) == expected
    nodes.clear()
    other = tmp_path_factory.mktemp("other")
    snapshot(other / "hub", 2)
    nodes.add(HF_HOME=str(other), HF_HUB_OFFLINE="1")
    with pytest.raises(MismatchError, match="another encoder") as caught:
        on(nodes, pictures, fresh=True, **asked)
    assert caught.value.exit_code == 4
    assert "weights_sha256" in str(caught.value.found) and "node " in str(caught.value.where)
    assert contents(pictures.output) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("startup", "name"),
    [
        ("import ncm_cli\nncm_cli.__version__ = '0.0.1'", "ncm 0.0.1"),
        ("import sys\nsys.modules['ncm_cli'] = None", "ncm not installed"),
        (
            "from importlib import metadata as m\nv = m.version\n"
            "m.version = lambda name: '0.0.1' if name == 'pillow' else v(name)",
            "pillow 0.0.1",
        ),
    ],
)
def test_a_node_with_other_versions_is_named(
    nodes: Nodes, make_pictures: Any, startup: str, name: str
) -> None:
    pictures = make_pictures(8)
    nodes.add(startup=startup)
    with pytest.raises(MismatchError, match="another version") as caught:
        on(nodes, pictures)
    assert caught.value.found == name and "node " in str(caught.value.where)
    assert not journal_folder(pictures.output).exists()


@pytest.mark.slow
def test_a_picture_that_ends_encoders_is_named(nodes: Nodes, make_pictures: Any) -> None:
    pictures = make_pictures(40)
    nodes.add(startup=DEADLY)
    with pytest.raises(InputError, match="ended 3 times while it had the same pictures") as caught:
        on(nodes, pictures)
    named = str(caught.value.found).split(", ")
    assert len(named) == 8 and any(name.endswith("/13.png") for name in named)
    nodes.clear()
    nodes.add()
    _, said = on(nodes, pictures)
    assert any("32 of 40 are done" in note for note in said.notes)


@pytest.mark.slow
def test_without_a_node_it_waits_and_then_says_so(
    nodes: Nodes, make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = make_pictures(200)
    expected = clean(pictures)
    monkeypatch.setattr("ncm_cli.images.nodes.MAX_SECONDS_WITHOUT", 4.0)
    only = nodes.add(startup=SLOW)
    with pytest.raises(InputError, match="no node of the cluster is left") as caught:
        on(nodes, pictures, once(40, lambda: nodes.kill(only)))
    assert "finished rows are kept" in str(caught.value.fix)
    nodes.add()
    on(nodes, pictures)
    assert contents(pictures.output) == expected


def test_what_the_cluster_lacks_is_said_before_any_work(
    nodes: Nodes, make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    pictures = make_pictures(4)
    nodes.add()
    refused: list[tuple[dict[str, Any], type[NcmError], str]] = [
        ({"cpus": 7}, InputError, "no node of the cluster has that many cores"),
        ({"model": "timm:resnet18", "device": "cuda", "cpus": None}, InputError, "the cluster has no GPU"),
    ]
    for changes, error, match in refused:
        with pytest.raises(error, match=match):
            on(nodes, pictures, **changes)
    monkeypatch.setattr(ray, "__version__", "2.0.0")
    with pytest.raises(MismatchError, match="another version of Ray or Python") as caught:
        on(nodes, pictures)
    assert "Ray 2.0.0" in str(caught.value.expected)
    assert not journal_folder(pictures.output).exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cpus": 2}, "--cpus needs --cluster"),
        ({"cluster": "local", "shard": "0/2"}, "both share out"),
        ({"cluster": "local", "device": "cuda:1", "model": "timm:resnet18"}, "which GPU"),
        ({"cluster": "local", "device": "cuda", "cpus": 2, "model": "timm:resnet18"}, "on the CPU"),
        ({"cluster": "http://x"}, "address of a cluster"),
        ({"cluster": "local", "from_array": "x.npy"}, "can't be combined with --from-array"),
    ],
)
def test_options_that_do_not_go_together(pictures: Pictures, changes: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        pictures.embed(**changes)


def test_each_gpu_has_an_encoder_or_each_few_cores() -> None:
    node = ClusterNode("id", "name", cpus=10, gpus=2)
    found = {}
    for device, cpus in (("cuda", None), ("cpu", None), ("cpu", 3)):
        cluster = Cluster(None, "auto", device, cpus)
        found[device, cpus] = cluster.places(node), cluster.cores(node)
    assert found == {("cuda", None): (2, 5), ("cpu", None): (2, 4), ("cpu", 3): (3, 3)}
    assert Cluster(None, "auto", "cpu", None).places(ClusterNode("id", "name", cpus=2, gpus=0)) == 1
    assert Cluster(None, "auto", "cpu", 3).places(ClusterNode("id", "name", cpus=2, gpus=0)) == 0


def test_a_recipe_does_not_embed_again_on_another_cluster() -> None:
    assert {("embed", "cluster"), ("embed", "cpus")} <= NEUTRAL


@pytest.mark.slow
def test_local_starts_ray_and_ends_it(make_pictures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    pictures = make_pictures(40)
    expected = clean(pictures)
    line = ["embed", str(pictures.manifest), "-o", str(pictures.output), "--cluster", "local", "--cpus", "1"]
    assert run([*line, "--batch-size", "8", "--model", "pixels:4"]) == 0
    assert contents(pictures.output) == expected
    assert not ray.is_initialized()
    shown = capsys.readouterr()
    assert "Ray " in shown.err and "on 1 node (cpu)" in shown.out
