"""Licences of what extras bring: by what is installed, through what that requires."""

import importlib.util
from importlib.metadata import Distribution, version
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("licences", REPOSITORY / "docs/tools/licences.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Written(Distribution):
    """A package with these lines as its metadata."""

    def __init__(self, *lines):
        self.text = "\n".join(["Metadata-Version: 2.4", "Name: x", "Version: 1", *lines])

    def read_text(self, filename):
        return self.text if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


def test_what_extras_bring_is_listed_with_what_that_requires(tool):
    pytest.importorskip("fastapi")
    found = {package.name: package for package in tool.brought_by("serve")}
    assert found["prometheus-client"].version == version("prometheus-client")
    assert {"fastapi", "starlette", "llguidance"} <= found.keys(), "by way of an extra of transformers, and its own"
    assert found["tqdm"].is_copyleft and not found["fastapi"].is_copyleft
    assert not {"ray", "pytest"} & found.keys()
    with pytest.raises(ValueError, match="no extra"):
        tool.brought_by("nothing")


def test_the_page_names_what_is_copyleft(tool, capsys):
    pytest.importorskip("ray")
    pytest.importorskip("fastapi")
    assert tool.main(["serve", "ray"]) == 0
    names = capsys.readouterr().out.strip().rpartition("copyleft: ")[2].split(", ")
    section = (REPOSITORY / "docs/server.md").read_text().partition("## Licences")[2].partition("\n## ")[0]
    assert [name for name in names if name not in section] == []


@pytest.mark.parametrize(
    ("lines", "licence", "is_copyleft"),
    [
        (["License-Expression: MIT", "License: GPL"], "MIT", False),
        (["Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"],
         "Mozilla Public License 2.0 (MPL 2.0)", True),
        (["Classifier: License :: OSI Approved", "License: GPLv2"], "GPLv2", True),
        (["License-Expression: LGPL-2.1-or-later"], "LGPL-2.1-or-later", True),
        ([], "unknown", False),
    ],
)  # fmt: skip
def test_where_packages_say_their_licence(tool, lines, licence, is_copyleft):
    assert tool.licence_of(Written(*lines)) == licence
    assert tool.Package("x", "1", licence).is_copyleft == is_copyleft


def test_what_is_not_installed_is_listed_too(tool, monkeypatch, tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.optional-dependencies]\nodd = ["no-such-package-here", "pytest"]\n')
    monkeypatch.setattr(tool, "_PROJECT", project)
    found = {package.name: package for package in tool.brought_by("odd")}
    assert found["no-such-package-here"].licence == "not installed" and found["pytest"].version
