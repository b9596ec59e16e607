"""The nodes of a Ray cluster, as `rlpost doctor cluster=ray` sees them: versions, speed, addresses without answer."""

from __future__ import annotations

import socket

import pytest

from rlpost.errors import ConfigError, MissingExtraError, PolicyError
from rlpost.remote.cluster import NodeReport, connect, differences, gpus_seen, versions, without_gpus
from tests.command_line import CommandLine
from tests.says import Says

HERE = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"}


def test_versions_that_differ_and_nodes_that_do_not_answer_are_told(says: Says) -> None:
    fit = NodeReport("a", "10.0.0.1", True, versions=HERE)
    other = NodeReport("b", "10.0.0.2", True, versions={**HERE, "torch": "2.11.0", "vllm": "0.32.0"})
    silent = NodeReport("c", "10.0.0.3", True, problem="did not answer within 5 s")
    gone = NodeReport("d", "10.0.0.4", False)
    found = differences([fit, other, silent, gone], HERE)
    assert [line.split()[0] for line in found] == ["c", "b", "b"]
    says("doctor", "\n".join(found))
    assert versions()["python"].startswith("3.")


@pytest.mark.ray
def test_an_address_that_does_not_answer_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PolicyError, match=address):
            connect(address, seconds=1)


@pytest.mark.ray
def test_an_address_of_rays_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="ray://"):
        connect("ray://head:10001")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: package != "ray")
    with pytest.raises(MissingExtraError, match=r"rlpost\[ray\]"):
        connect()


@pytest.mark.ray
def test_a_cluster_of_this_machine_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = "cluster=ray cluster.address=local model=tiny policy=transformers env.digits=1 env.max_completion_tokens=8"
    told = CommandLine(capsys).json(f"doctor {words}")
    node, cluster = told["findings"][:2]
    assert (node["level"], node["about"], cluster["about"]) == ("ok", "node", "cluster")
    assert "reads 100 MB in " in node["text"]
    assert (told["error"], told["findings"][-1]["about"]) == (0, "time")


@pytest.mark.ray
def test_a_port_of_something_else_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:  # which takes connections and never says a word
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PolicyError, match=f"{address}.* 1 s"):
            connect(address, seconds=1)


def test_a_new_cluster_is_not_offered_the_gpu_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    with without_gpus([1]):
        assert gpus_seen() == ["4", "7"]
    assert gpus_seen() == ["4", "6", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with without_gpus([0]):  # the only one is shared
        assert gpus_seen() == ["4"]
