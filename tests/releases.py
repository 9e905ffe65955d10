"""
Run a part of the tests with every supported release line of transformers, each in an environment of its own, print a
table, and write it into the README: `make test-versions`.

Environments lie in `.releases/`, one folder a release with the log of its tests, and are used again. What has been run
for this state of the code is not repeated: after Ctrl-C, the same command goes on. `rm -rf .releases` starts over.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / ".releases"
README = REPOSITORY / "README.md"
# The newest patch of each; and the newest release of all, whatever its number.
LINES = ("5.20", "5.21", "5.22", "5.23", "5.24")
# What is run with each, of the tests: at most five minutes.
SUITE = (
    "tests/test_exactness.py",  # sources, dtypes, greedy and sampled
    "tests/test_architectures.py",
    "tests/generate/test_mixin.py",
    "tests/generate/test_mixin_going_on.py",
    "tests/generate/test_outputs.py",
    "tests/generate/test_returned_cache.py",
    "tests/generate/test_encoders.py",
    "tests/prepare",
    "tests/target_model",
    "tests/cpu",
    "tests/candidates/heads",  # MTP
    "tests/serving/test_engine.py",
    "tests/serving/test_adapters.py",  # PEFT
    "tests/serving/transformers_batching",
)
OF_SERVER = "tests/serving/server"  # with the releases that the extra `serve` allows
LIMIT = 1800  # seconds after which a release's tests are given up
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TABLE = re.compile(r"(<!-- releases -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass
class Result:
    """What the tests of one release have shown, for one state of the code."""

    release: str
    state: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="test processes; each computes with one thread")
    workers = parser.parse_args().workers
    results = []
    try:
        for release in releases():
            results.append(tested(release, workers))
            print_result(results[-1])
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here")
        return 130
    print("\n" + as_table(results, with_seconds=True))
    README.write_text(with_table(README.read_text(), as_table(results)))
    return int(any(result.failed for result in results))


def with_table(page: str, table: str) -> str:
    return TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


def releases() -> list[str]:
    """The newest patch of every line and the newest release that the index has, in order."""
    found = [newest(f"transformers=={line}.*") for line in LINES]
    return list(dict.fromkeys([*found, newest("transformers")]))


def newest(requirement: str) -> str:
    """The version that pip would install."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--report", "-"]
    report = json.loads(pip(Path(sys.executable), "install", *options, requirement, capture=True))
    return report["install"][0]["metadata"]["version"]


def tested(release: str, workers: int) -> Result:
    folder = FOLDER / release
    known, state = folder / "result.json", state_of_code()
    if known.exists() and (result := Result(**json.loads(known.read_text()))).state == state:
        return result
    python = environment(release)
    result = run(python, release, state, workers)
    known.write_text(json.dumps(asdict(result)))
    return result


def state_of_code() -> str:
    """A digest of what is tested, and of how."""
    digest = hashlib.sha256()
    for folder in ("hf_smartspec", "candidates", "tests"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            digest.update(path.relative_to(REPOSITORY).as_posix().encode() + path.read_bytes())
    for name in ("constraints.txt", "pyproject.toml"):
        digest.update((REPOSITORY / name).read_bytes())
    return digest.hexdigest()


def environment(release: str) -> Path:
    """The Python of a release's environment, which is made where it is not there or would be another."""
    folder = FOLDER / release
    python, done = folder / "bin" / "python", folder / "installed.txt"
    constraints, torch = constraints_for_others()
    requirements = [f"transformers[serving]=={release}", *others()]
    wanted = "\n".join([torch, *requirements, "", constraints])
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"transformers {release}: installing", flush=True)
    venv.create(folder, with_pip=True)  # completes one that an interruption has left
    bounds = folder / "constraints.txt"
    bounds.write_text(constraints)
    # torch alone and first: nothing that follows may choose another build of it.
    for packages in (["setuptools", torch], requirements):
        pip(python, "install", "--constraint", str(bounds), *packages)
    done.write_text(wanted)
    return python


def constraints_for_others() -> tuple[str, str]:
    """The project's constraints without transformers and what it bounds itself; and the pin of torch."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    bounded = ("transformers==", "tokenizers==", "huggingface_hub==", "safetensors==")
    torch = next(line for line in lines if line.startswith("torch=="))
    return "\n".join(line for line in lines if not line.startswith(bounded)), torch


def others() -> list[str]:
    """What the library and these tests need besides transformers and torch."""
    wanted = "pytest pytest-xdist hypothesis peft trl scipy datasets openai httpx matplotlib".split()
    of_tests = [item for item in extras()["test"] if Requirement(item).name in wanted]
    needed = [*project()["dependencies"], *extras()["serve"], *of_tests]
    return [item for item in needed if Requirement(item).name not in ("transformers", "torch")]


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def extras() -> dict[str, list[str]]:
    return project()["optional-dependencies"]


def pip(python: Path, *arguments: str, capture: bool = False) -> str:
    """
    Raises:
        subprocess.CalledProcessError: where pip fails, after it has said why.
    """
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout or ""


def run(python: Path, release: str, state: str, workers: int) -> Result:
    report, log = FOLDER / release / "report.xml", FOLDER / release / "tests.log"
    report.unlink(missing_ok=True)
    print(f"transformers {release}: testing, {log.relative_to(REPOSITORY)}", flush=True)
    options = ["-q", "-n", str(workers), "-p", "no:cacheprovider", f"--junitxml={report}"]
    start = time.monotonic()
    with log.open("w") as file:
        command = [str(python), "-m", "pytest", *options, *suite(release)]
        try:
            subprocess.run(
                command,
                cwd=REPOSITORY,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                env=os.environ | ENVIRONMENT,
            )
        except subprocess.TimeoutExpired:
            return Result(release, state, failed=[f"not done after {LIMIT} s"], seconds=LIMIT)
    result = Result(release, state, seconds=round(time.monotonic() - start, 1))
    if not report.exists():
        result.failed.append("pytest has not begun")
        return result
    for name, outcome in outcomes(report):
        if outcome == "passed":
            result.passed += 1
        elif outcome == "skipped":
            result.skipped += 1
        else:
            result.failed.append(name)
    return result


def suite(release: str) -> list[str]:
    """The tests that are run with a release."""
    (bound,) = [item for item in extras()["serve"] if item.startswith("transformers")]
    can_serve = Requirement(bound).specifier.contains(release, prereleases=True)
    return [*SUITE, OF_SERVER] if can_serve else list(SUITE)


def outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Names of tests, and "passed", "skipped", "failure" or "error"."""
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        yield f"{case.get('classname')}::{case.get('name')}", kinds.pop() if kinds else "passed"


def print_result(result: Result) -> None:
    for name in result.failed:
        print(f"  failed: {name}")
    counts = f"{result.passed} passed, {len(result.failed)} failed, {result.skipped} skipped"
    print(f"transformers {result.release}: {counts}, {result.seconds:.0f} s", flush=True)


def as_table(results: list[Result], with_seconds: bool = False) -> str:
    rows = ["| transformers | passed | failed | skipped |", "| --- | --- | --- | --- |"]
    rows += [f"| {item.release} | {item.passed} | {len(item.failed)} | {item.skipped} |" for item in results]
    if with_seconds:
        last = [" seconds |", " --- |", *(f" {item.seconds:.0f} |" for item in results)]
        rows = [row + seconds for row, seconds in zip(rows, last)]
    python = ".".join(map(str, sys.version_info[:2]))
    torch = constraints_for_others()[1].replace("==", " ")
    return "\n".join([*rows, "", f"{date.today()}, Python {python}, {torch}."])


if __name__ == "__main__":
    sys.exit(main())
