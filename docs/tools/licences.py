"""Licences of what this project's extras bring, by what is installed, copyleft ones first: `make licences`."""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_COPYLEFT = re.compile(r"GPL|GNU|\bMPL|Mozilla|\bEPL|\bCDDL|\bEUPL")


class Package(NamedTuple):
    """An installed package (one that is not has no version) and what its metadata say of its licence."""

    name: str
    version: str
    licence: str

    @property
    def is_copyleft(self) -> bool:
        return _COPYLEFT.search(self.licence) is not None


def brought_by(extra: str) -> list[Package]:
    """
    The packages that an extra of this project requires, and what these require in turn, by name.

    Raises:
        ValueError: for an extra that is not there.
    """
    extras = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if extra not in extras:
        raise ValueError(f"{extra!r} is no extra of this project: {', '.join(extras)} are.")
    found: dict[str, Package] = {}
    open_ones, seen = [Requirement(line) for line in extras[extra]], set()
    while open_ones:
        item = open_ones.pop()
        name = canonicalize_name(item.name)
        if (name, *sorted(item.extras)) in seen:
            continue
        seen.add((name, *sorted(item.extras)))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            found[name] = Package(name, "", "not installed")
            continue
        found[name] = Package(name, package.version, licence_of(package))
        open_ones += _required(package, item.extras)
    return [found[name] for name in sorted(found)]


def _required(package: Distribution, extras: Iterable[str]) -> list[Requirement]:
    """What a package requires here, with these extras of it."""
    items = [Requirement(line) for line in package.requires or ()]
    given = [{"extra": extra} for extra in ("", *extras)]
    return [item for item in items if item.marker is None or any(map(item.marker.evaluate, given))]


def licence_of(package: Distribution) -> str:
    """In one line: an SPDX expression where there is one, or else classifiers, or what stands under "License"."""
    fields = package.metadata
    kinds = [line.rpartition(" :: ")[2] for line in fields.get_all("Classifier") or () if line.startswith("License ::")]
    known = [kind for kind in kinds if kind != "OSI Approved"]
    text = fields.get("License-Expression") or ", ".join(known) or (fields.get("License") or "").strip()
    return text.splitlines()[0] if text else "unknown"


def main(extras: list[str]) -> int:
    packages = {package for extra in extras for package in brought_by(extra)}
    ordered = sorted(packages, key=lambda package: (not package.is_copyleft, package.name))
    for package in ordered:
        print(f"{package.name:42} {package.version:16} {package.licence[:60]}")
    names = ", ".join(package.name for package in ordered if package.is_copyleft)
    print(f"{len(ordered)} packages of {', '.join(extras)}; copyleft: {names or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["serve", "ray"]))
