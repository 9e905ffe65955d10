"""The `smartspec` command. Only a command that runs is imported: torch and transformers take seconds."""

import argparse
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from .common.arguments import UsageError

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Command(NamedTuple):
    """
    Place of a command. Its module has `run(args) -> int`; `add_arguments(parser)` is in the module that is called
    `arguments` where that is called `command`, and imports neither torch nor transformers.
    """

    module: str
    help: str
    package: str = __package__ or ""

    def add_arguments(self, parser: "Parser") -> None:
        module = self.module
        if module.endswith(".command"):
            module = f"{module.removesuffix('command')}arguments"
        importlib.import_module(f"{self.package}.{module}").add_arguments(parser)

    def run(self, args: argparse.Namespace, parser: "Parser") -> int:
        """Return its exit status. Arguments that it refuses end as those that the parser refuses."""
        try:
            module = importlib.import_module(f"{self.package}.{self.module}")
            if not sys.stderr.isatty() and self.module != "completion":
                from transformers.utils.logging import disable_progress_bar

                disable_progress_bar()
            status: int = module.run(args)
            return status
        except UsageError as error:
            parser.fail(str(error))


COMMANDS = {
    ("generate",): Command("generate.command", "answer prompts, or every row of a dataset"),
    ("chat",): Command("chat.command", "talk with a model in the terminal"),
    ("serve",): Command("serve.command", "serve models over HTTP, with the interface of OpenAI's"),
    ("transformers",): Command("launch", "run transformers' own command, which then drafts"),
    ("demo",): Command("demo.command", "show races, load and learning on a page in the browser"),
    ("verify",): Command("verify.command", "check on your own model that speculation changes nothing"),
    ("replay",): Command("replay.command", "measure candidate sources on real responses, without a model"),
    ("profile",): Command("profile.command", "measure what a model's forward costs, once per model and machine"),
    ("train",): Command("train.command", "train a drafter for a target of yours"),
    ("tune",): Command("tune.command", "find options of candidate sources that fit recorded responses"),
    ("datastore", "build"): Command("datastore_build.command", "build a file of continuations, from texts"),
    ("bench", "generate"): Command("speed.command", "measure `assistant=` against plain `generate`"),
    ("bench", "load"): Command("load.command", "measure latency and goodput of the engine over the request rate"),
    ("completion",): Command("completion", "write a script that completes this command in a shell"),
}
GROUPS = {"bench": "measure speed on your own model", "datastore": "continuations from a large text"}
# Benches of the repository that are not installed: `python -m benchmarks NAME`.
IN_A_CHECKOUT = tuple(
    "batch batching drafters gpu memory online overhead papers peers published queue replicas rollouts simulate "
    "sources tenants timeline".split()
)
EPILOGS = {"bench": f"In a checkout of the repository, python -m benchmarks NAME has more: {', '.join(IN_A_CHECKOUT)}."}
# As a newcomer meets them; a verb that is in none of these stands among the last.
SECTIONS = {
    "Use a model": ("generate", "chat", "serve", "transformers", "demo"),
    "Check and measure": ("verify", "bench", "profile"),
    "Drafters": ("train", "tune", "replay", "datastore"),
    "This command": ("completion",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (the check failed), 2 (bad arguments) or 130 (Ctrl-C)."""
    return guarded("smartspec", _dispatch, list(sys.argv[1:] if argv is None else argv))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def guarded(program: str, dispatch: Callable[[list[str]], int], arguments: list[str]) -> int:
    """
    Return the exit status of `dispatch(arguments)`; after Ctrl-C or on a full disk, print one line in the name of
    `program`.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`, where nobody reads it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the end)
    try:
        try:
            return dispatch(arguments)
        finally:
            print(end="", flush=True)  # at the interpreter's exit, what fails would be reported as an ignored exception
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has left
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _discard_output()
        place = "" if error.filename is None else f" {error.filename!r}"
        print(f"{program}: error: cannot write{place}: {error.strerror}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Lead standard output nowhere: what is buffered is written once more at the interpreter's exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    path = _command_path(arguments)
    if path is None:
        return _top_level(arguments)
    parser = load_parser(path)
    args = parser.parse_args(arguments[len(path) :])
    if path == ("completion",):
        args.full_parser = full_parser
    return COMMANDS[path].run(args, parser)


def _command_path(arguments: list[str]) -> tuple[str, ...] | None:
    """Return the command that the first words name, or None."""
    return next((path for path in COMMANDS if tuple(arguments[: len(path)]) == path), None)


def load_parser(path: tuple[str, ...]) -> "Parser":
    """Return the parser of a command's arguments."""
    parser = Parser(prog=" ".join(("smartspec", *path)), description=sentence(COMMANDS[path].help))
    COMMANDS[path].add_arguments(parser)
    return parser


def full_parser() -> "Parser":
    """Return one parser with all commands and their arguments."""
    return _tree(lambda path, parser: COMMANDS[path].add_arguments(parser))


def _top_level(arguments: list[str]) -> int:
    """Print the help or the version, or refuse words that name no command."""
    parser = _tree(lambda path, parser: None)
    if message := _unknown_word(arguments):
        parser.fail(message)
    args = parser.parse_args(arguments)
    if args.version:
        from .. import __version__

        print(f"smartspec {__version__}")
        return 0
    parser.print_help(sys.stderr)
    return USAGE_ERROR


def _unknown_word(arguments: Sequence[str]) -> str:
    """Return an error for the first word that names no command; "" if all words name commands."""
    known: tuple[str, ...] = ()
    for word in arguments:
        here = [path for path in COMMANDS if path[: len(known)] == known]
        names = {path[len(known)]: path[: len(known) + 1] for path in here}
        if word.startswith("-"):
            return ""
        if word not in names:
            return _refusal(word, {path[-1]: path for path in here} | names)
        known = names[word]
    return ""


def _refusal(word: str, known: Mapping[str, tuple[str, ...]]) -> str:
    """Return an error with the command that the word may have meant, or the place of the bench of that name."""
    if word in IN_A_CHECKOUT:
        return f"the bench {word!r} is in the repository: python -m benchmarks {word}, in a checkout"
    calls = {name: f"python -m benchmarks {name}" for name in IN_A_CHECKOUT}
    calls |= {name: " ".join(("smartspec", *path)) for name, path in known.items()}
    near = difflib.get_close_matches(word, calls, n=1)
    return f"invalid choice: {word!r}" + "".join(f", did you mean {calls[name]!r}?" for name in near)


def _tree(fill: Callable[[tuple[str, ...], "Parser"], None]) -> "Parser":
    """Return the parser of the commands' names; `fill` adds a command's arguments to its subparser."""
    top = _TopParser(prog="smartspec", description="Lossless speculative decoding for HuggingFace transformers.")
    top.add_argument("--version", action="store_true", help="show the version and exit")
    commands = top.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)
    groups: dict[str, Any] = {}
    for path, command in COMMANDS.items():
        *group, name = path
        place = commands
        for word in group:
            if word not in groups:
                parent = commands.add_parser(word, help=GROUPS[word], description=sentence(GROUPS[word]))
                parent.epilog = EPILOGS.get(word)
                groups[word] = parent.add_subparsers(
                    metavar="COMMAND", title="commands", required=True, parser_class=Parser
                )
            place = groups[word]
        fill(path, place.add_parser(name, help=command.help, description=sentence(command.help)))
    return top


def overview() -> str:
    """Return the help of `smartspec`: all commands, by section."""
    helps = {path[0]: GROUPS.get(path[0], command.help) for path, command in COMMANDS.items()}
    rest = [name for name in helps if not any(name in names for names in SECTIONS.values())]
    width = max(map(len, helps)) + 2
    lines = ["usage: smartspec COMMAND ...", "", "Lossless speculative decoding for HuggingFace transformers.", ""]
    for number, (title, names) in enumerate(SECTIONS.items(), start=1):
        shown = [*names, *(rest if number == len(SECTIONS) else [])]
        lines += [f"{title}:", *(f"  {name:{width}}{helps[name]}" for name in shown if name in helps), ""]
    return "\n".join([*lines, "smartspec COMMAND --help shows its arguments; --version shows the version.", ""])


def sentence(text: str) -> str:
    """Return a help line as a sentence."""
    return text[0].upper() + text[1:] + "."


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line that ends with a reference to --help, and that takes no abbreviated options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [name for name in self._option_string_actions if name.startswith("--")]
            near = [difflib.get_close_matches(word.partition("=")[0], options, n=1) for word in unknown]
            names = [found[0] for word, found in zip(unknown, near) if found and word.startswith("-")]
            meant = f"; did you mean {' '.join(names)}?" if names else ""
            self.fail(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.fail(message)

    def fail(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


class _TopParser(Parser):
    def format_help(self) -> str:
        return overview()


if __name__ == "__main__":
    sys.exit(main())
