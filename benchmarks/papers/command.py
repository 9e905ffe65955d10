"""`python -m benchmarks papers`: figures and tables of the five papers, each beside what its paper found."""

import argparse

from rich.console import Console
from rich.markup import escape

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.console import make_console
from hf_smartspec.commands.common.models import demo_folder
from hf_smartspec.commands.common.names import JOINT
from hf_smartspec.commands.common.outputs import check_output
from hf_smartspec.commands.common.real_model import real_model
from hf_smartspec.commands.main import main as smartspec

from ..benches import BENCHES, load_parser, parse
from ..kit.plots import check_folder
from .figures import FIGURES, Figure, Play

_TITLES = {"smartspec": "SmartSpec", "sssd": "SSSD", "osd": "OSD", "suffix": "SuffixDecoding", "su": "Su et al."}


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    if args.plots:
        check_folder(args.plots)
    figures = _chosen(args)
    console, status = make_console(), 0
    for name, figure in figures.items():
        _print_head(args.paper, name, figure, console)
        for number, play in enumerate(figure.plays):
            words = words_of(play, args, f"{args.paper}-{name}" + (f"-{number + 1}" if number else ""))
            console.print(f"[dim]{escape(play.on)}:[/dim] {escape(' '.join(words))}\n", highlight=False, soft_wrap=True)
            if not args.list:
                status = max(status, _run(words))
    return status


def _chosen(args: argparse.Namespace) -> dict[str, Figure]:
    """Return the figures that are asked for; raises `UsageError` for names that the paper has not."""
    known = FIGURES[args.paper]
    missing = [name for name in args.figure or () if name not in known]
    if missing:
        raise UsageError(f"--figure: {args.paper} has no {missing[0]!r} here, but {', '.join(known)}")
    return {name: known[name] for name in args.figure or known}


def _print_head(paper: str, name: str, figure: Figure, console: Console) -> None:
    kind, _, number = name.rpartition("-")
    title = f"{_TITLES[paper]}, {kind.capitalize() or 'Figure'} {number}"
    console.print(f"[bold]{title}[/bold]: {escape(figure.title)}", highlight=False)
    console.print(f"The paper: {escape(figure.found)}.", highlight=False)


def words_of(play: Play, args: argparse.Namespace, name: str) -> list[str]:
    """
    Return the words of the command that plays a figure, with the arguments of this one that it takes.

    Args:
        name (`str`): Of the figure, for the names of files.
    """
    words = play.command.split()
    if words[0] == "smartspec":
        model = args.model or real_model() or str(demo_folder("--model") / "models" / "target")
        return [model if word == "MODEL" else _in_checkout(word) for word in words] + args.also
    options = load_parser(words[0])._option_string_actions
    if "MODEL" in words:
        at = words.index("MODEL")
        model = args.model or real_model()
        words[at - 1 : at + 1] = ["--model", model] if model else []
    elif args.model and "--model" in options:
        words += ["--model", args.model]
    words = [_in_checkout(word) for word in (_without_texts(words) if args.prompts else words)]
    if args.prompts:
        words += ["--prompts", *map(str, args.prompts)]
    if args.json:
        words += ["--json", str(args.json.with_stem(f"{args.json.stem}-{name}"))]
    if args.plots and "--plots" in options:
        words += ["--plots", str(args.plots)]
    elif args.plots and "--plot" in options:
        words += ["--plot", str(args.plots / f"{name}.svg")]
    return words + args.also


def _is_file(word: str) -> bool:
    return word.startswith("demos/")


def _without_texts(words: list[str]) -> list[str]:
    return [word for word in words if not (_is_file(word) and ".jsonl" in word) and word != "--prompts"]


def _in_checkout(word: str) -> str:
    """Return a word in which files of the repository, also those joined by plus signs, have their whole paths."""
    parts = word.split(JOINT)
    return JOINT.join(
        str(demo_folder("--prompts") / part.removeprefix("demos/")) if _is_file(part) else part for part in parts
    )


def _run(words: list[str]) -> int:
    """Run a bench, or a command of smartspec, and return its exit status."""
    if words[0] == "smartspec":
        return smartspec(words[1:])
    parser = load_parser(words[0])
    return BENCHES[words[0]].run(parse(parser, words[1:]), parser)
