"""The quick start, command by command, from an empty directory."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/quickstart.md"
_PACKED = ["hf_smartspec", "candidates", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"]
_FETCHER = "tests/real_model.py"


def _checkout(folder):
    folder.mkdir()
    for name in _PACKED:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        options = {"ignore": shutil.ignore_patterns("__pycache__"), "symlinks": True} if copy is shutil.copytree else {}
        copy(REPOSITORY / name, folder / name, **options)
    (folder / "tests").mkdir()
    shutil.copy(REPOSITORY / _FETCHER, folder / _FETCHER)


@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.usefixtures("real_folder")  # fetched before
def test_the_quick_start_does_what_it_says(tmp_path):
    text = PAGE.read_text()
    commands = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r'^```py title="first.py"\n(.*?)^```', text, flags=re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(commands) == 2

    _checkout(tmp_path / "hf-smartspec")
    (tmp_path / "first.py").write_text(program)
    # What is needed is here already: nothing is fetched. Compiled code is the repository's.
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    environment |= {"PYTHONPATH": f"{REPOSITORY}:{sysconfig.get_path('purelib')}", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    script = "set -e\n" + "".join(commands)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

    assert (tmp_path / ".venv/bin/smartspec").exists()
    lines, expected = done.stdout.splitlines()[-4:], printed.splitlines()
    without_counts = [re.sub(r"\(\d+ in \d+ forwards\)", "", line) for line in lines]
    assert without_counts == [re.sub(r"\(\d+ in \d+ forwards\)", "", line) for line in expected]
    first, second = (int(re.findall(r"in (\d+) forwards", line)[0]) for line in lines[:2])
    assert second < first < 52
