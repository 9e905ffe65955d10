"""`python -m benchmarks papers`: what it lists, plays and refuses."""

import argparse
from pathlib import Path

import pytest

from benchmarks.benches import load_parser, parse
from benchmarks.load.simulate import command as simulate
from benchmarks.papers import command
from benchmarks.papers.arguments import PAPERS
from benchmarks.papers.figures import FIGURES
from hf_smartspec.commands import main as cli

from .helpers import bench

PLAYS = [
    pytest.param(play, id=f"{paper}-{name}-{number}")
    for paper, figures in FIGURES.items()
    for name, figure in figures.items()
    for number, play in enumerate(figure.plays)
]


def arguments(**changes):
    values = {"model": None, "prompts": [], "json": None, "plots": None, "also": []}
    return argparse.Namespace(**values | changes)


def test_every_paper_has_figures_that_can_be_played():
    assert tuple(FIGURES) == PAPERS
    assert all(figure.plays for figures in FIGURES.values() for figure in figures.values())


@pytest.mark.parametrize("play", PLAYS)
def test_a_command_is_accepted_with_the_arguments_that_are_passed_on(play, tmp_path):
    for args in (arguments(), arguments(model="MODEL", prompts=[Path("a.jsonl")], json=tmp_path / "x.json")):
        words = command.words_of(play, args, "name")
        if words[0] == "smartspec":
            cli.load_parser((words[1],)).parse_args(words[2:])
            continue
        parsed = parse(load_parser(words[0]), words[1:])
        if args.model:
            assert parsed.model == "MODEL" and parsed.json == tmp_path / "x-name.json"
        for path in getattr(parsed, "files", ()):
            name, _, _ = str(path).partition(":")
            assert name == "a.jsonl" if args.prompts else Path(name).is_file()


def test_figures_are_listed_and_none_is_played(capsys):
    assert bench("papers", "suffix", "--list") == 0
    out = capsys.readouterr().out
    assert "SuffixDecoding, Table 2" in out and "The paper: " in out and "memory --prompts" in out


def test_a_figure_is_played_below_what_its_paper_found(capsys, monkeypatch):
    played = []
    monkeypatch.setattr(simulate, "run", lambda args: played.append(args) or 1)
    assert bench("papers", "su", "--figure", "5", "--also", "--requests 7") == 1, "a claim of the bench failed"
    (args,) = played
    assert (args.figures, args.requests) == (["cv"], 7)
    out = capsys.readouterr().out
    assert out.index("2.3 times on average") < out.index("simulated: a 7 B model")


@pytest.mark.parametrize(
    "words, message",
    [
        (["smartspec", "--figure", "99"], "smartspec has no '99' here, but 1, 3, 5,"),
        (["nobody"], "invalid choice: 'nobody'"),
        ([], "required: paper"),
    ],
)
def test_unknown_names_are_refused(words, message, capsys):
    assert bench("papers", *words) == 2
    assert message in capsys.readouterr().err
