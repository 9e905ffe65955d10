"""`python -m benchmarks`: what it lists, accepts and refuses."""

import importlib
from pathlib import Path

import pytest

from benchmarks.benches import BENCHES, load_parser, parse
from hf_smartspec.commands.main import COMMANDS, IN_A_CHECKOUT

from ..commands.helpers import check_imports
from .helpers import bench


def test_the_installed_command_knows_where_the_others_are():
    assert {*IN_A_CHECKOUT, *(path[1] for path in COMMANDS if path[0] == "bench")} == set(BENCHES)


def test_the_list_names_every_bench(capsys):
    assert bench("--help") == 0
    assert set(BENCHES) <= set(capsys.readouterr().out.split())
    assert bench() == 2 and "usage: python -m benchmarks NAME" in capsys.readouterr().err


def test_a_misspelt_name_gets_one_line(capsys):
    assert bench("overhed") == 2
    err = capsys.readouterr().err
    assert "invalid choice: 'overhed', did you mean 'overhead'?" in err and err.count("\n") == 1


def test_help_and_refusals_import_neither_torch_nor_transformers():
    main = "from benchmarks.__main__ import main; from benchmarks.benches import BENCHES"
    check_imports(main, "([name] for name in BENCHES)")


def test_arguments_offer_what_benches_know():
    """The choices of arguments are written out, since importing their definitions takes seconds."""
    from benchmarks.decode.gpu.shapes import Plan
    from benchmarks.load.simulate.figures import FIGURES
    from benchmarks.replay.sources.command import ABLATIONS

    known = {"replay.sources": ABLATIONS, "decode.gpu": Plan().shapes, "load.simulate": FIGURES}
    for name, items in known.items():
        arguments = importlib.import_module(f"benchmarks.{name}.arguments")
        assert tuple(items) in vars(arguments).values(), name


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_help_and_writes_json(name, capsys):
    assert bench(name, "--help") == 0
    out = capsys.readouterr().out
    assert f"benchmarks {name}" in out and " --json FILE" in out


@pytest.mark.parametrize("name", "generate drafters online queue batching load batch timeline".split())
def test_the_default_dtype_is_that_of_the_files(name):
    assert load_parser(name).get_default("dtype") == "auto"


def test_prompts_are_files_named_in_another_way():
    parser = load_parser("queue")
    assert parse(parser, ["--prompts", "a.jsonl", "b.jsonl"]).files == [Path("a.jsonl"), Path("b.jsonl")]
    assert parse(parser, ["a.jsonl", "--prompts", "b.jsonl"]).files == [Path("a.jsonl"), Path("b.jsonl")]
    assert "prompts" not in parse(parser, [])


@pytest.mark.parametrize("name", ["online", "sources"])
def test_files_that_must_be_named_are_asked_for(name, tmp_path, capsys):
    assert bench(name) == 2 and "required: FILE or --prompts FILE" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_takes_a_model_and_prompts_of_ones_own(name):
    assert {"--model", "--prompts"} <= load_parser(name)._option_string_actions.keys()


NEEDED = {"online": "{prompts}", "sources": "{prompts}", "gpu": "--device cpu --smoke", "papers": "suffix"}


@pytest.mark.parametrize("name", BENCHES)
def test_results_that_cannot_be_written_are_refused_before_any_work(name, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    words = NEEDED.get(name, "").format(prompts=tmp_path / "p.jsonl").split()
    assert bench(name, *words, "--json", "/no/such/folder/x.json") == 2
    err = capsys.readouterr().err
    assert "cannot write '/no/such/folder/x.json'" in err and "Traceback" not in err
