"""Connects to a cluster of Ray, for ``ncm embed --cluster`` and ``ncm run --cluster``.

Ray is an optional package, imported only when a cluster is asked for. The versions that a node has installed
are compared with those of this process before the node gets any work.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncm_cli import __version__
from ncm_cli.errors import InputError, MismatchError, UsageError, listing
from ncm_cli.progress import Reporter

DISTRIBUTIONS = (
    "numpy", "pillow", "torch", "torchvision", "timm", "open_clip_torch", "scipy", "scikit-learn"
)  # fmt: skip
"""Packages whose version must be the same on all nodes, since it may change a result."""

CLIENT_PORT = 10001
"""Where a cluster listens for programs that don't run on one of its nodes (``ray://``)."""

REACH_SECONDS = 5.0
"""Longest wait for a connection to a cluster's address; Ray itself waits minutes if the address is wrong."""

_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""A client's first bytes: the preface and empty settings (RFC 9113, 3.4)."""

ANSWER_SECONDS = 120.0
"""Longest wait for a node to say what it has installed; a worker process starts meanwhile."""


@dataclass(frozen=True)
class ClusterNode:
    """A node of a cluster: its id, a readable name, and the cores and GPUs that it lends to Ray."""

    id: str
    name: str
    cpus: int
    gpus: int


def parse_cluster(text: str) -> str:
    """An address of ``--cluster``: ``local``, ``auto``, HOST:PORT or ray://HOST:PORT."""
    if text not in ("local", "auto") and _host_and_port(text) is None:
        raise UsageError(
            "an address of a cluster that can't be read",
            where=f"--cluster {text}",
            expected="local (this machine alone), auto (the cluster that this machine is part of), HOST:PORT "
            f"or, from outside the cluster, ray://HOST:{CLIENT_PORT}",
        )
    return text


@contextlib.contextmanager
def connected(address: str, reporter: Reporter) -> Iterator[Any]:
    """The module ray, connected to the cluster at ``address`` while the context is open.

    ``local`` starts Ray on this machine alone, and stops it at the end. A process that was connected before
    stays connected. A note counts the cluster's nodes, cores and GPUs.

    Raises
    ------
    InputError
        The optional package ``ray`` isn't installed, or the cluster can't be reached.
    MismatchError
        The cluster runs another version of Ray or Python.
    """
    ray, where, started = _require_ray(), f"--cluster {address}", time.monotonic()
    with contextlib.ExitStack() as stack:
        how = "connected"
        if not ray.is_initialized():
            _probe(address)
            how = "started" if address == "local" else how
            local_options = {"include_dashboard": False} if address == "local" else {}
            stack.callback(ray.shutdown)
            sigterm_handler = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(address, log_to_driver=False, logging_level="CRITICAL", **local_options)
            except Exception as error:  # Ray raises errors of any class
                raise _refusal(error, where) from None
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, sigterm_handler)  # Ray has set its own
        alive, seconds = nodes(ray), time.monotonic() - started
        cpus, gpus = (sum(getattr(node, name) for node in alive) for name in ("cpus", "gpus"))
        ray_address = address if address.startswith("ray:") else ray.get_runtime_context().gcs_address
        reporter.note(
            f"Ray {ray.__version__} at {ray_address}, {how} in {seconds:.1f} s: "
            f"{counted(len(alive), 'node')}, {counted(cpus, 'core')}, {counted(gpus, 'GPU')}"
        )
        yield ray


def nodes(ray: Any) -> list[ClusterNode]:
    """The live nodes of the cluster; the names of nodes with the same address include their ids."""
    listed = ray.nodes()
    hosts = Counter(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in listed)
    alive = []
    for node in listed:
        if node["Alive"]:
            host = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            name = host if hosts[host] == 1 else f"{host}, node {node['NodeID'][:8]}"
            resources = node["Resources"]
            counts = (int(resources.get(kind, 0)) for kind in ("CPU", "GPU"))
            alive.append(ClusterNode(node["NodeID"], name, *counts))
    return alive


def refuse_small(nodes: Sequence[ClusterNode], address: str, *, gpu: bool = False, cpus: int = 1) -> None:
    """Raise `InputError` if no node has a GPU, when ``gpu`` is set, or otherwise ``cpus`` cores."""
    most = max((node.cpus for node in nodes), default=0)
    if gpu and not any(node.gpus for node in nodes):
        raise InputError(
            "the cluster has no GPU",
            where=f"--cluster {address}",
            found=listing(node.name for node in nodes),
            fix="--device cpu, or start its nodes with: ray start --num-gpus N",
        )
    if not gpu and most < cpus:
        raise InputError(
            "no node of the cluster has that many cores",
            where=f"--cluster {address}",
            found=f"at most {most} on one node",
            expected=f"--cpus {cpus}",
            fix=f"--cpus {most}" if most else "start its nodes with: ray start --num-cpus N",
        )


def installed_versions() -> dict[str, str]:
    """The versions of ncm, Python and the packages that may change a result.

    A build tag such as ``+cpu`` doesn't count, since the command may be started on a node without a GPU.
    """
    versions = {"ncm": __version__, "Python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def ask_versions(ray: Any, node: ClusterNode) -> Any:
    """Ask a node what it has installed; the answer is for `refuse_other_versions`."""
    return on_node(ray, node, ray.remote(_version_question()), num_cpus=0).remote()


def refuse_other_versions(node: ClusterNode, found: dict[str, str]) -> None:
    """Raise `MismatchError` with the first version in which a node differs from this process."""
    for name, version in installed_versions().items():
        node_version = found.get(name, "not installed")
        if node_version != version:
            raise MismatchError(
                f"a node of the cluster has another version of {name}",
                where=node.name,
                found=f"{name} {node_version}",
                expected=f"{name} {version}, as where the command was started",
                fix="install the same versions on all nodes",
            )


def checked_nodes(ray: Any, address: str, *, gpu: bool = False, cpus: int = 1) -> list[ClusterNode]:
    """The nodes of the cluster. One has a GPU, or as many cores, and all have the versions of this process.

    Nodes that go away meanwhile are skipped. Raises what `refuse_small` does, `MismatchError` with the node
    and the version, and `InputError` if a node doesn't answer.
    """
    alive = nodes(ray)
    refuse_small(alive, address, gpu=gpu, cpus=cpus)
    asked = [(node, ask_versions(ray, node)) for node in alive]
    until = time.monotonic() + ANSWER_SECONDS
    for node, answer in asked:
        try:
            node_versions = ray.get(answer, timeout=max(0.1, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            what, fix = "a node of the cluster doesn't answer", "ray status, on one of its nodes, says more"
            raise InputError(
                what, where=node.name, found=f"no answer within {ANSWER_SECONDS:.0f} s", fix=fix
            ) from None
        except ray.exceptions.RayError:
            continue
        refuse_other_versions(node, node_versions)
    return alive


def on_node(ray: Any, node: ClusterNode, remote: Any, **options: Any) -> Any:
    """A remote function or class with ``options``, to run on that node and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False), **options)


def _version_question() -> Callable[[], dict[str, str]]:
    # A function inside a function is sent as code, so that a node without ncm can run it.
    def ask() -> dict[str, str]:
        try:
            import ncm_cli
        except ImportError:
            return {"ncm": "not installed"}
        try:
            from ncm_cli.ray_cluster import installed_versions
        except ImportError:
            return {"ncm": ncm_cli.__version__}
        return installed_versions()

    return ask


def _require_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Work without a GPU sees none, as before; this silences Ray's notice that a later version changes that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise _broken(error) from error
        raise InputError("the package ray isn't installed", fix="pip install 'ncm-cli[ray]'") from None
    except Exception as error:  # such as a library of another version
        raise _broken(error) from error
    return ray


def _broken(error: Exception) -> InputError:
    found = f"{type(error).__name__}: {error}"
    return InputError("the package ray can't be imported", found=found, fix="pip install -U 'ncm-cli[ray]'")


def _host_and_port(address: str) -> tuple[str, int] | None:
    match = re.fullmatch(r"(ray://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+)(?::(\d{1,5}))?", address)
    if match is None or not (match[1] or match[3]):
        return None
    port = int(match[3] or CLIENT_PORT)
    return (match[2].strip("[]"), port) if 0 < port < 1 << 16 else None


def _probe(address: str) -> None:
    """Raise `InputError` if nothing listens at the address of a cluster."""
    where = f"--cluster {address}"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto":
        with contextlib.suppress(ImportError, AttributeError, TypeError):  # the function isn't public
            from ray._private.services import get_ray_address_from_environment

            try:
                address = get_ray_address_from_environment("auto", None)
            except ConnectionError as error:
                raise _refusal(error, where) from None
    target = _host_and_port(address)
    if target is None:
        return
    try:
        with socket.create_connection(target, REACH_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":  # a gRPC server begins by sending its settings
                connection.sendall(_HTTP2_GREETING)
                connection.settimeout(REACH_SECONDS)
                if not connection.recv(1):
                    raise ConnectionError("the connection was closed")
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        raise _refusal(error, where, address) from None


def _refusal(error: BaseException, where: str, address: str = "") -> InputError | MismatchError:
    """The error for a failed connection, with what the user can do about it."""
    text = " ".join(str(error).split())
    pairs = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if len(pairs) == 2:
        cluster_versions, own_versions = (f"Ray {version}, Python {python}" for version, python in pairs)
        return MismatchError(
            "the cluster runs another version of Ray or Python",
            where=where,
            found=cluster_versions,
            expected=own_versions,
            fix="the same versions on all nodes and where the command is started",
        )
    if "ray[client]" in text:
        return InputError("the package ray has no client", where=where, fix="pip install 'ray[client]'")
    if "--address" in text:  # an option of Ray's own command
        text = "no cluster runs on this machine"
    token = Path("~/.ray/auth_token").expanduser()
    advice = ["start it with: ray start --head, and further nodes with: ray start --address HOST:6379"]
    if not where.startswith("--cluster ray:"):
        advice.append(f"from outside the cluster ray://HOST:{CLIENT_PORT}")
    is_likely = "RAY_AUTH_MODE" not in os.environ and token.is_file()  # newer versions of Ray make one
    advice.insert(0 if is_likely else len(advice), f"if it has a token ({token}): export RAY_AUTH_MODE=token")
    advice.append("--cluster local needs none of this")
    return InputError(
        "the cluster can't be reached",
        where=where,
        found=f"{address}: {text}" if address else text or type(error).__name__,
        fix="; ".join(advice),
    )


def counted(count: int, what: str) -> str:
    """A number of things, in words: ``1 node``, ``2 nodes``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
