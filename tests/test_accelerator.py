"""
What a GPU would be asked for, without one: the tests of `on_accelerator.py`, of its neighbours `on_accelerator_*.py`,
and of `emulated_accelerator.py`, on an emulated device.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.end_to_end  # most of a minute
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch has no Python backends"
)
def test_on_an_emulated_accelerator():
    """In a process of its own, since what torch says of a machine cannot be taken back."""
    files = [*map(str, sorted(ROOT.glob("tests/on_accelerator*.py"))), "tests/emulated_accelerator.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
