"""What `make` says of environments that it cannot use."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
OLD_PYTHON = """#!/bin/sh
case "$1" in
--version) echo Python 3.10.12 ;;
*) exit 1 ;;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_environment_of_an_old_python_is_told_from_a_broken_one(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(OLD_PYTHON)
    python.chmod(0o755)
    result = subprocess.run(["make", "setup"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0 and "installing" not in result.stdout
    assert ".venv has Python 3.10.12; 3.11 or newer is needed: rm -rf .venv, then make setup" in result.stdout
