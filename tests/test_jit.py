"""Compiled code: what is kept on disk, where, and when it is compiled anew."""

import ctypes
import fcntl
import importlib
import io
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numba import config
from numba.core import event
from transformers.utils import logging as transformers_logging

import hf_smartspec
from hf_smartspec import jit
from hf_smartspec.candidates.text.suffix.kernels.store import find

_CALLER = """
from hf_smartspec.jit import compiled
from .called import scaled

@compiled
def total(n):
    number = 0
    for k in range(n):
        number += scaled(k)
    return number
"""
_CALLED = """
from hf_smartspec.jit import inner

@inner
def scaled(k):
    return FACTOR * k
"""

_CALLBACK = """
from hf_smartspec.jit import callback
from hf_smartspec.jit.pointers import int64_at, take
from .called import scaled

@callback
def put(address):
    while int64_at(address)[0] < scaled(5):
        take(int64_at(address))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that calls one of another file, in a package of its own that a process has not imported yet."""
    folder = tmp_path / "room" / "kernels_of_a_test"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "caller.py").write_text(_CALLER)
    write_factor(folder, 2)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(jit._progress, "_seconds_waited", 0.0)  # this process may have waited for another one's code
    yield folder
    forget()


def write_factor(folder, factor):
    (folder / "called.py").write_text(_CALLED.replace("FACTOR", str(factor)))


def forget():
    """What a process that begins has not imported."""
    for name in [name for name in sys.modules if name.startswith("kernels_of_a_test")]:
        del sys.modules[name]
    jit.stamp.cache_clear()
    importlib.invalidate_caches()


def import_anew():
    forget()
    return importlib.import_module("kernels_of_a_test.caller").total


class Compiled(event.Listener):
    """Names of what numba compiles."""

    def __init__(self):
        self.names = []

    def on_start(self, event):
        self.names.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event): ...


def call_anew():
    """Result of a process' first call, and what had to be compiled for it."""
    total, listener = import_anew(), Compiled()
    with event.install_listener("numba:compile", listener):
        return total(5), [name for name in listener.names if name in ("total", "scaled")]


def code_files(folder):
    return sorted(path.name for path in folder.rglob("*.nbc"))


@pytest.fixture
def said(monkeypatch):
    """What is said from now on."""
    messages = []
    monkeypatch.setattr(jit.logger, "info", messages.append)
    jit.announce.cache_clear()
    return messages


def test_who_waits_for_the_compiler_is_told_once(package, said, tmp_path, monkeypatch):
    call_anew()
    assert said == ["Compiling inner loops, for half a minute to one, once per installation."]
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "another folder"))
    call_anew()
    write_factor(package, 3)
    call_anew()
    assert len(said) == 1


def test_a_terminal_has_a_bar_while_something_is_compiled(package, monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)  # commands that ran in this process switch it off
    call_anew()
    assert "compiling inner loops" in shown.getvalue() and "total" in shown.getvalue()
    assert shown.getvalue().endswith("\r"), "nothing is left of it"
    written = shown.getvalue()
    assert call_anew() == (20, []) and shown.getvalue() == written


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, object(), closed()], ids=["none", "no stream", "closed"])
def test_any_stderr_will_do(package, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    result, _ = call_anew()
    assert result == 20


def test_nothing_is_said_where_code_lies_on_the_disk(package, said):
    call_anew()
    said.clear()
    jit.announce.cache_clear()
    assert call_anew() == (20, []) and said == []


def test_who_has_to_wait_in_every_process_is_told_the_remedy(package, said, tmp_path, monkeypatch):
    (package / "__pycache__").touch()
    (tmp_path / "user").touch()
    call_anew()
    (message,) = said
    assert "in every process" in message and "`NUMBA_CACHE_DIR`" in message
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "named"))
    assert call_anew() == (20, ["total", "scaled"]) and call_anew() == (20, [])


def test_code_is_compiled_once_and_kept_beside_its_source(package):
    assert call_anew() == (20, ["total", "scaled"])
    assert call_anew() == (20, [])
    (name,) = code_files(package / "__pycache__")
    assert name.startswith("caller_total.")
    assert [path for path in package.rglob("*") if path.suffix == ".tmp"] == []


def test_an_edit_of_a_called_function_in_another_file_is_noticed(package):
    assert call_anew() == (20, ["total", "scaled"])
    old = code_files(package)
    write_factor(package, 3)
    assert call_anew() == (30, ["total", "scaled"])
    assert call_anew() == (30, [])
    assert len(code_files(package)) == 1 and code_files(package) != old, "stale code is deleted"


def test_an_edit_after_the_import_is_kept_apart(package):
    """What runs is the old source, whatever lies on the disk by the time of the first call."""
    total = import_anew()
    write_factor(package, 3)
    assert total(5) == 20
    assert call_anew() == (30, ["total", "scaled"])


def test_code_of_another_compiler_is_not_used(package, monkeypatch):
    assert call_anew() == (20, ["total", "scaled"])
    monkeypatch.setattr(jit.numba, "__version__", "0.0")
    assert call_anew() == (20, ["total", "scaled"])


def test_import_writes_nothing(package):
    import_anew()
    assert sorted(path.name for path in package.rglob("*")) == ["__init__.py", "called.py", "caller.py"]


@pytest.mark.end_to_end
def test_import_of_the_library_writes_and_deletes_no_machine_code(tmp_path):
    """Of a copy, beside whose machine code no other process of the tests writes its own."""
    copied = tmp_path / "hf_smartspec"
    shutil.copytree(Path(hf_smartspec.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    old = copied / "cpu" / "kernels" / "__pycache__" / "norms_norm.cpython-311-0000000000000000.nbi"
    old.parent.mkdir()
    old.touch()
    code = "from hf_smartspec import *; import hf_smartspec.commands.serve.command, hf_smartspec.commands.speed.command"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    assert list(tmp_path.rglob("*.nb?")) == [old]


def test_where_the_package_cannot_be_written_the_user_keeps_the_code(package, tmp_path):
    (package / "__pycache__").touch()  # no folder can be made there, not even by an administrator
    assert call_anew() == (20, ["total", "scaled"])
    assert call_anew() == (20, []), "found again"
    assert len(code_files(tmp_path / "user")) == 1
    write_factor(package, 3)
    assert call_anew() == (30, ["total", "scaled"])
    assert len(code_files(tmp_path / "user")) == 1


def test_where_nothing_can_be_written_code_is_compiled_and_not_kept(package, tmp_path):
    (package / "__pycache__").touch()
    (tmp_path / "user").touch()
    assert call_anew() == call_anew() == (20, ["total", "scaled"])


def test_damaged_files_are_compiled_anew(package):
    call_anew()
    (path,) = package.rglob("*.nbc")
    whole = path.read_bytes()
    wrong = bytearray(whole)
    wrong[len(whole) // 2] ^= 1
    for content in (b"", whole[:100], wrong):
        path.write_bytes(content)
        assert call_anew() == (20, ["total", "scaled"])
    assert call_anew() == (20, [])


@contextmanager
def locked(path):
    """Lock a module's file until it is closed, as another process does while it compiles."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def test_processes_that_start_together_compile_once(package, tmp_path, monkeypatch):
    """One waits until the other is done, and loads what the other has compiled."""
    call_anew()
    (path,) = package.rglob("*.nbc")
    path.rename(tmp_path / "of the other")

    def end(_):
        (tmp_path / "of the other").rename(path)
        file.close()

    monkeypatch.setattr(jit, "sleep", end)
    with locked(path.with_name("caller.lock")) as file:
        assert call_anew() == (20, [])


def test_a_process_that_was_stopped_while_compiling_is_not_waited_for(package, monkeypatch):
    path, paused = package / "__pycache__" / "caller.lock", []
    path.parent.mkdir()
    monkeypatch.setattr(jit, "sleep", paused.append)
    with locked(path):
        assert call_anew() == (20, ["total", "scaled"])
        assert sum(paused) == pytest.approx(60, abs=0.1)
        assert call_anew() == (20, [])
        write_factor(package, 3)
        assert call_anew() == (30, ["total", "scaled"])
        assert sum(paused) == pytest.approx(60, abs=0.1), "once is enough"


def test_a_process_holds_one_lock_at_a_time(package, monkeypatch):
    """Two that held one each, and waited for the other's, would never end."""
    (package / "called.py").write_text(_CALLED.replace("inner", "compiled").replace("FACTOR", "2"))
    path = package / "__pycache__" / "called.lock"
    path.parent.mkdir()
    monkeypatch.setattr(jit, "sleep", None)
    with locked(path):
        assert call_anew() == (20, ["total", "scaled"])


def is_locked(package):
    (path,) = package.rglob("caller.lock")
    assert path.stat().st_mode & 0o077 == 0, "other users could keep the lock"
    try:
        with locked(path):
            return False
    except BlockingIOError:
        return True


def test_a_module_is_locked_while_its_functions_are_compiled(package, monkeypatch):
    found, save = [], jit._DiskCache.save_overload
    monkeypatch.setattr(jit._DiskCache, "save_overload", lambda *args: found.append(is_locked(package)) or save(*args))
    assert call_anew() == (20, ["total", "scaled"])
    assert found == [True] and not is_locked(package)


def test_where_files_cannot_be_locked_every_process_compiles(package, monkeypatch):
    def fail(*_):
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert call_anew() == (20, ["total", "scaled"])
    assert call_anew() == (20, [])


def test_failing_writes_do_not_fail_the_call(package, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(jit.os, "replace", full)
    assert call_anew() == (20, ["total", "scaled"])
    assert list(package.rglob("*.nbc")) == list(package.rglob("*.tmp")) == []


def test_a_function_is_compiled_once_for_all_widths_and_constants(package):
    listener, name = Compiled(), package / "widths.py"
    name.write_text(
        "import numpy as np\n" + _CALLER.replace("scaled(k)", "scaled(k) + scaled(2) + scaled(np.int32(k))")
    )
    forget()
    total = importlib.import_module("kernels_of_a_test.widths").total
    with event.install_listener("numba:compile", listener):
        assert total(5) == 20 + 20 + 20
    assert listener.names.count("scaled") == 1


def test_functions_of_steps_are_compiled_before_they_are_called(package, monkeypatch):
    lines = "@compiled_for('i8:1 f8', 'f4:2 f8')", "def first(numbers, factor):", "    return numbers[0] * factor"
    (package / "ahead.py").write_text("\n".join(["from hf_smartspec.jit import compiled_for", *lines]))
    monkeypatch.setattr(jit, "_ahead", [])
    first, listener = importlib.import_module("kernels_of_a_test.ahead").first, Compiled()
    with event.install_listener("numba:compile", listener):
        jit.compile_ahead()
        assert listener.names.count("first") == 2 and not jit._ahead
        assert first(np.array([3]), 0.5) == 1.5 and list(first(np.full((1, 2), 2, np.float32), 0.5)) == [1.0, 1.0]
        jit.compile_ahead()
    assert listener.names.count("first") == 2


def test_callbacks_are_compiled_once_and_called_by_their_address(package):
    (package / "calling.py").write_text(_CALLBACK)
    for expected in (["scaled"], []):
        forget()
        listener, number = Compiled(), ctypes.c_int64(5)
        with event.install_listener("numba:compile", listener):
            put = importlib.import_module("kernels_of_a_test.calling").put
            assert listener.names == []
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(put.address)(ctypes.addressof(number))
        assert number.value == 10
        assert len(code_files(package)) == 1 and listener.names == expected


def test_inner_functions_cannot_be_called_from_python():
    with pytest.raises(TypeError, match="`find` can only be called by compiled code"):
        find(0, 0, 0)


def test_inner_functions_are_compiled_within_their_callers_alone(package):
    """Look for machine code of their own, which would take as long again as that of all callers."""
    total = import_anew()
    assert total(4) == 2 * (0 + 1 + 2 + 3) and has_machine_code(total)
    assert not has_machine_code(importlib.import_module("kernels_of_a_test.called").scaled)


def has_machine_code(function) -> bool:
    (found,) = function.overloads.values()
    return found.library.get_pointer_to_function(found.fndesc.llvm_func_name) != 0
