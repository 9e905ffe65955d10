"""Folders of functions that are compiled to machine code."""

import ast
from pathlib import Path

import hf_smartspec


def test_every_kernel_lies_in_a_folder_whose_sources_it_is_compiled_from():
    """`jit.stamp` looks at the function's own folder and that of `jit`: nothing compiled may come from another."""
    folder = Path(hf_smartspec.__file__).parent
    paths = [*folder.rglob("*.py"), *(folder / "candidates").resolve().rglob("*.py")]
    assert {path.parent.parent.name for path in paths if path.parent.name == "kernels"} == {
        "drafts",
        "goodput",
        "suffix",
        "heads",
        "layout",
        "cpu",
        "sampling",
    }
    for path in paths:
        tree = ast.parse(path.read_text())
        imports = [(node.level, node.module or "") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        if any(module.startswith("jit") for _, module in imports) and path.parent.name == "kernels":
            for level, module in imports:
                is_foreign = module.split(".")[0] == "hf_smartspec" if level == 0 else level > 1
                assert not is_foreign or module in ("jit", "jit.pointers", "jit.writing"), path
