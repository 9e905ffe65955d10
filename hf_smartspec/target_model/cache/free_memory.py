"""Memory that this process may still take: the machine's, and that of the control groups (cgroups) it runs in."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

_FALLBACK_BYTES = 2**32  # assumed where the system does not report free memory
_MACHINE = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, own_groups: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> int:
    """
    Return the bytes of free memory: a GPU's, or the machine's within the limits of the container. Cached files, which
    the kernel drops on demand, count as free.

    Args:
        own_groups (`Path`): The file in which the kernel lists the process's cgroups.
        groups (`Path`): The folder where cgroups are mounted.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_left_to_machine(), *_left_to_groups(own_groups, groups)])


def _left_to_machine() -> int:
    try:
        fields = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):  # no Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError):  # Windows, macOS
        return _FALLBACK_BYTES


def _left_to_groups(own_groups: Path, groups: Path) -> Iterator[int]:
    """
    Yield the bytes left within each limit on the process: of every memory cgroup that it is in, and of their parents.
    """
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, own = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2
            root, limit, used, reclaimable = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        # A container may see its own group as the root, where the group's path on the host does not exist.
        path = PurePosixPath(own.lstrip("/"))
        for folder in (root / path, *(root / parent for parent in path.parents)):
            left = _left(folder, limit, used, reclaimable)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """
    Return the bytes left in a cgroup, at least 0; None where it has no limit.
    """
    try:
        text = (folder / limit).read_text().strip()
        if text == "max":
            return None
        taken = int((folder / used).read_text())
        counts = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
        return max(int(text) - max(taken - int(counts.get(reclaimable, 0)), 0), 0)
    except (OSError, ValueError):  # not mounted, or not readable
        return None
