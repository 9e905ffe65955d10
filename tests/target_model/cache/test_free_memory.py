"""Free memory in containers: limits of control groups, of both versions."""

import os

import pytest
import torch

from hf_smartspec.target_model.cache import free_memory
from hf_smartspec.target_model.cache.free_memory import free_bytes

CPU, GIB = torch.device("cpu"), 2**30
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Pretend that 64 GiB are free, half of them in cached files."""
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: {96 * 2**20} kB\nMemFree: {32 * 2**20} kB\nMemAvailable:   {64 * 2**20} kB\n")
    monkeypatch.setattr(free_memory, "_MACHINE", path)
    return path


@pytest.fixture
def free(tmp_path):
    """Free bytes of a process whose `/proc/self/cgroup` says so."""

    def ask(own):
        (tmp_path / "self").write_text(own)
        return free_bytes(CPU, tmp_path / "self", tmp_path / "groups")

    return ask


def add_group(tmp_path, path, names, limit, used, files=0):
    folder = tmp_path / "groups" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - files}\n{names[2]} {files}\n")


def test_without_groups_the_machine_counts(free, tmp_path):
    assert free_bytes(CPU, tmp_path / "nothing", tmp_path) == 64 * GIB
    assert free("0::/\n") == free("4:memory:/a/b\n0::/\n") == free("nonsense\n\n") == 64 * GIB


def test_systems_that_do_not_tell_what_is_available(free, machine, monkeypatch):
    pages = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 16 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    for text in ("MemFree: 1 kB\n", "nonsense\n"):
        machine.write_text(text)
        assert free("0::/\n") == 16 * GIB
    machine.unlink()
    assert free("0::/\n") == 16 * GIB


@pytest.mark.parametrize("names, line, root", [(V2, "0::", ""), (V1, "7:cpu:/\n4:memory:", "memory/")])
def test_limits_of_groups(free, tmp_path, names, line, root):
    """The least that any of them has left; what was read of files is not in use."""
    add_group(tmp_path, f"{root}jobs/one", names, 8 * GIB, 3 * GIB)
    assert free(f"{line}/jobs/one\n") == 5 * GIB
    add_group(tmp_path, f"{root}jobs/one", names, 8 * GIB, 3 * GIB, files=2 * GIB)
    assert free(f"{line}/jobs/one\n") == 7 * GIB
    add_group(tmp_path, f"{root}jobs", names, 10 * GIB, 6 * GIB)
    assert free(f"{line}/jobs/one\n") == 4 * GIB, "that which it lies in has less left"
    assert free(f"{line}/other\n") == 64 * GIB
    add_group(tmp_path, f"{root}jobs", names, 2 * GIB, 3 * GIB)
    assert free(f"{line}/jobs/one\n") == 0


@pytest.mark.parametrize("names, line, root", [(V2, "0::", ""), (V1, "4:memory,cpu:", "memory")])
def test_a_container_that_sees_its_own_group_as_the_root(free, tmp_path, names, line, root):
    add_group(tmp_path, root, names, 2 * GIB, GIB)
    assert free(f"{line}/\n") == free(f"{line}/docker/0123\n") == free(f"{line}/../other\n") == GIB


def test_groups_without_a_limit(free, tmp_path):
    add_group(tmp_path, "a", V2, "max", 3 * GIB)
    add_group(tmp_path, "memory/a", V1, 0x7FFFFFFFFFFFF000, 3 * GIB)
    assert free("4:memory:/a\n0::/a\n") == 64 * GIB


def test_the_groups_of_this_process_can_be_read(monkeypatch):
    monkeypatch.undo()
    assert 0 < free_bytes(CPU) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
