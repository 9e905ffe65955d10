"""The names of the package: all there, and none imported before it is asked for."""

import ast
import inspect
import subprocess
import sys

import pytest

import hf_smartspec


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_every_public_name_is_there_and_listed():
    imports = [
        node for node in ast.walk(ast.parse(inspect.getsource(hf_smartspec))) if isinstance(node, ast.ImportFrom)
    ]
    typed = {alias.asname: node.module for node in imports if node.level for alias in node.names}
    assert typed == hf_smartspec._MODULES, "for type checkers, and at run time"
    for name in hf_smartspec.__all__:
        assert getattr(hf_smartspec, name).__name__ == name
        assert name in dir(hf_smartspec)
    for name in hf_smartspec._ROOMS:
        assert getattr(hf_smartspec, name).__name__ == f"hf_smartspec.{name}"
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = hf_smartspec.Engin


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, hf_smartspec; print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    assert run(code).strip() == "[]"


def test_help_and_typing_errors_need_no_torch():
    code = (
        "import sys, contextlib, io\n"
        "from hf_smartspec.commands.main import main\n"
        "for words in (['--help'], ['--version'], ['servee'], ['bench']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):\n"
        "        main(words)\n"
        "print('torch' in sys.modules)"
    )
    assert run(code).splitlines()[-1] == "False"
