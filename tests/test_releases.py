"""Which releases of transformers are tested, and what is said of them."""

import re
import tomllib

import pytest

from hf_smartspec.target_model.private import NEWEST_TESTED

from . import releases
from .releases import Result, as_table, outcomes, with_table


def test_the_readme_shows_every_line_without_a_failure():
    (table,) = [match[0] for match in releases.TABLE.finditer(releases.README.read_text())]
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \| (\d+) \| (\d+) \| \d+ \|$", table, flags=re.MULTILINE)
    supported = rows[: len(releases.LINES)]  # a newer one may follow
    assert [line for line, *_ in supported] == list(releases.LINES)
    assert all(int(passed) > 1000 and failed == "0" for _, passed, failed in supported)


def test_the_lines_reach_from_the_oldest_supported_to_the_newest_tested():
    project = tomllib.loads((releases.REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"transformers>={releases.LINES[0]},<6" in project["dependencies"]
    assert releases.LINES[-1] == str(NEWEST_TESTED)
    assert all((releases.REPOSITORY / path).exists() for path in releases.SUITE)


def test_tables_are_put_between_the_markers():
    results = [Result("5.20.2", "", 7, [], 2, 31.4), Result("5.24.0", "", 5, ["test_a", "test_b"], 2, 30.0)]
    page = with_table("a\n<!-- releases -->\nold\n<!-- end -->\nb", as_table(results))
    assert page.startswith("a\n<!-- releases -->\n\n| transformers | passed |") and page.endswith("<!-- end -->\nb")
    assert "old" not in page and "| 5.20.2 | 7 | 0 | 2 |\n| 5.24.0 | 5 | 2 | 2 |\n" in page
    assert "| 5.20.2 | 7 | 0 | 2 | 31 |" in as_table(results, with_seconds=True)


def test_outcomes_of_a_report(tmp_path):
    kinds = {"a": "", "b": "<failure/>", "c": "<skipped/>", "d": "<error/>"}
    cases = "".join(f'<testcase classname="t" name="{name}">{kind}</testcase>' for name, kind in kinds.items())
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert dict(outcomes(report)) == {"t::a": "passed", "t::b": "failure", "t::c": "skipped", "t::d": "error"}


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """Environments in a folder of the test's, installed and tested by nobody; what was asked for."""
    asked = []
    monkeypatch.setattr(releases, "FOLDER", tmp_path)
    monkeypatch.setattr(
        releases.venv, "create", lambda folder, with_pip: (folder / "bin").mkdir(parents=True, exist_ok=True)
    )
    monkeypatch.setattr(releases, "pip", lambda python, *arguments: asked.append(arguments[-1]))

    def run(python, release, state, workers):
        asked.append("tests")
        return Result(release, state, passed=3)

    monkeypatch.setattr(releases, "run", run)
    return asked


def test_what_is_done_is_not_done_again(stubbed, monkeypatch):
    first = releases.tested("5.20.2", 2)
    assert stubbed[0].startswith("torch==") and stubbed[-1] == "tests" and len(stubbed) == 3
    assert releases.tested("5.20.2", 2) == first and len(stubbed) == 3
    monkeypatch.setattr(releases, "state_of_code", lambda: "another")
    assert releases.tested("5.20.2", 2).state == "another" and stubbed[3:] == ["tests"]
    monkeypatch.setattr(releases, "others", lambda: ["numpy"])
    monkeypatch.setattr(releases, "state_of_code", lambda: "a third")
    releases.tested("5.20.2", 2)
    assert stubbed[4:] == [stubbed[0], "numpy", "tests"]


def test_an_interrupted_installation_is_begun_anew(stubbed, monkeypatch):
    def interrupted(python, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(releases, "pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        releases.tested("5.20.2", 2)
    monkeypatch.setattr(releases, "pip", lambda python, *arguments: stubbed.append(arguments[-1]))
    releases.tested("5.20.2", 2)
    assert stubbed[0].startswith("torch==") and stubbed[-1] == "tests"
