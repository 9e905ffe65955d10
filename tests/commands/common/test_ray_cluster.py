"""Ray as the commands start it on one machine: it listens on loopback only, and reports to nobody."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")
import psutil

from hf_smartspec.commands.common import ray_cluster

from ...serving.helpers import TIMEOUT

SCRIPT = """
import json, os, sys
from hf_smartspec.commands.common.ray_cluster import ray_cluster
with ray_cluster(None, 1):
    import ray
    from ray._common.usage.usage_lib import usage_stats_enabled
    ray.get(ray.remote(num_cpus=0)(lambda: 1).remote())  # in a process of its own
    print(json.dumps([usage_stats_enabled(), os.environ["RAY_AUTH_MODE"], ray.util.get_node_ip_address()]), flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.end_to_end
def test_ray_listens_on_loopback_only_and_reports_nothing(monkeypatch):
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert json.loads(process.stdout.readline()) == [False, "token", "127.0.0.1"]
        addresses = listening(process.pid)
        assert len(addresses) > 5 and {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
    finally:
        process.stdin.close()
        process.wait(TIMEOUT)


def listening(pid):
    """Addresses on which a process and its children wait for connections."""
    parent, found = psutil.Process(pid), []
    for process in [parent, *parent.children(recursive=True)]:
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:  # it has ended meanwhile
            continue
        found += [item.laddr.ip for item in connections if item.status == psutil.CONN_LISTEN]
    return found


def test_a_cluster_that_runs_on_this_machine_is_not_joined(monkeypatch):
    asked = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "keep_private", lambda address: None)
    monkeypatch.setattr("ray.init", lambda **options: asked.update(options))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with ray_cluster.ray_cluster(None, 1) as is_own:
        assert is_own and asked["address"] == "local"


def test_what_the_operator_has_set_stays_and_clusters_of_others_are_left_alone(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    for name in ("RAY_AUTH_MODE", "RAY_enable_metrics_collection", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "x")  # put back at the end
        monkeypatch.delenv(name)
    ray_cluster.keep_private("somewhere:6379")
    environment = os.environ
    assert "RAY_AUTH_MODE" not in environment
    ray_cluster.keep_private(None)
    assert environment["RAY_AUTH_MODE"] == "token" and environment["RAY_USAGE_STATS_ENABLED"] == "1"
