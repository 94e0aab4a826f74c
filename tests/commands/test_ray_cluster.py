"""Connecting to a cluster of Ray: what is refused, and how soon."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import pytest

from ncm_cli import ray_cluster
from ncm_cli.errors import InputError, MismatchError, UsageError
from ncm_cli.progress import SILENT
from ncm_cli.ray_cluster import (
    ClusterNode,
    connected,
    installed_versions,
    parse_cluster,
    refuse_other_versions,
    refuse_small,
)

NODE = ClusterNode("6a1f", "host (10.0.0.2)", 8, 0)


@pytest.mark.parametrize(
    "text",
    ["local", "auto", "10.0.0.1:6379", "head:6379", "[::1]:6379", "ray://head", "ray://10.0.0.1:10001"],
)
def test_an_address_is_taken(text: str) -> None:
    assert parse_cluster(text) == text


@pytest.mark.parametrize("text", ["", "head", "http://head:1", "head:port", "a b:1", "ray://"])
def test_another_text_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="address of a cluster"):
        parse_cluster(text)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "no-such-host.invalid:6379", "auto"])
def test_a_cluster_that_is_not_there_is_an_error_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # where auto looks
    started = time.monotonic()
    with pytest.raises(InputError, match="can't be reached") as caught, connected(address, SILENT):
        pass
    assert time.monotonic() - started < 15
    assert caught.value.where == f"--cluster {address}" and "ray start --head" in str(caught.value.fix)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="ray isn't installed") as caught, connected("auto", SILENT):
        pass
    assert "ncm-cli[ray]" in str(caught.value.fix)


def test_another_ray_or_python_is_named() -> None:
    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n    Python: 3.10.1\n"
        "This process on node 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    found: Any = ray_cluster._refusal(RuntimeError(text), "--cluster auto")
    assert isinstance(found, MismatchError)
    assert (found.found, found.expected) == ("Ray 2.40.0, Python 3.10.1", "Ray 2.60.0, Python 3.11.7")


@pytest.mark.parametrize("name", ["ncm", "Python", "torch", "pillow"])
def test_another_version_on_a_node_is_named(name: str) -> None:
    refuse_other_versions(NODE, installed_versions())
    with pytest.raises(MismatchError, match=f"another version of {name}") as caught:
        refuse_other_versions(NODE, installed_versions() | {name: "0.1"})
    assert caught.value.where == NODE.name and caught.value.found == f"{name} 0.1"


def test_a_node_without_ncm_is_named() -> None:
    with pytest.raises(MismatchError, match="version of ncm") as caught:
        refuse_other_versions(NODE, {"ncm": "not installed"})
    assert caught.value.found == "ncm not installed"


def test_a_cluster_without_a_gpu_or_with_fewer_cores_is_refused() -> None:
    refuse_small([NODE], "auto", cpus=8)
    with pytest.raises(InputError, match="no GPU"):
        refuse_small([NODE], "auto", gpu=True)
    with pytest.raises(InputError, match="that many cores") as caught:
        refuse_small([NODE], "auto", cpus=9)
    assert caught.value.fix == "--cpus 8"


def test_a_server_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_cluster, "REACH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match="can't be reached"), connected(address, SILENT):
            pass


@pytest.mark.parametrize("address", ["a..b:6379", "a" * 80 + ":6379"])
def test_a_name_that_no_host_has_is_an_error(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="can't be reached"), connected(address, SILENT):
        pass


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_port_that_there_is_not_is_a_usage_error(port: int) -> None:
    with pytest.raises(UsageError):
        parse_cluster(f"127.0.0.1:{port}")


def test_a_ray_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "ray":
                raise RuntimeError("boom")

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(InputError, match="can't be imported") as caught, connected("local", SILENT):
        pass
    assert "boom" in str(caught.value)
