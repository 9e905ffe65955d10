"""Instructions that compiled code is written in."""

import pytest
from llvmlite import ir

from hf_smartspec.jit import writing


@pytest.mark.parametrize(("name", "locality"), [("znver5", 0), ("sapphirerapids", 2), ("skylake-avx512", 2)])
def test_prefetched_lines_displace_nothing_on_the_cpus_where_that_is_faster(monkeypatch, name, locality):
    monkeypatch.setattr(writing, "cpu_name", lambda: name)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [writing.I8.as_pointer()]), "reads")
    builder = ir.IRBuilder(function.append_basic_block())
    writing.prefetch(builder, function.args[0])
    builder.ret_void()
    assert f"i32 0, i32 {locality}, i32 1)" in str(function)
