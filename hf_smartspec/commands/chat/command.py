"""`smartspec chat`: a conversation with a model, in the terminal."""

import argparse
import difflib
from collections.abc import Callable
from typing import NamedTuple

from ..common.answering.arguments import sampling_of
from ..common.answering.speaker import assistant_of, load_speaker, shown
from ..common.arguments import UsageError, not_negative, not_negative_number
from ..common.console import table
from ..common.outputs import check_output, write_json
from .screen import Screen
from .session import Conversation, Session


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    sampling = sampling_of(args)
    speaker, screen = load_speaker(args), Screen()
    conversation = Conversation(speaker.tokenizer, args.system)
    session = Session(speaker, conversation, screen, sampling, args.max_new_tokens, args.seed)
    try:
        session.greet()
        screen.complete(list(VERBS))
        converse(session)
    finally:
        session.stop()
        if args.json:
            write_json(args.json, session.report())
    return 1 if session.num_failed and not screen.is_interactive else 0


def converse(session: Session) -> None:
    """Answer turn by turn, until the user leaves."""
    was_interrupted = False
    while True:
        try:
            text = session.screen.read()
            was_interrupted = False
            if text.lstrip().startswith("/"):
                obey(session, text)
            elif text.strip():
                session.answer(text)
        except KeyboardInterrupt:
            if was_interrupted or not session.screen.is_interactive:
                raise
            was_interrupted = True
            session.screen.note("\nCtrl-C again, or Ctrl-D, leaves.")
        except EOFError:
            session.screen.note("")
            return


_WIDTH = 18  # of the first column of the help


class Verb(NamedTuple):
    """A command; `run(session, words)` raises `UsageError` or `ArgumentTypeError` for words that it cannot use."""

    argument: str
    help: str
    run: Callable[[Session, str], None]


def obey(session: Session, line: str) -> None:
    """Run a line that begins with a slash; raises `EOFError` to end the chat."""
    name, _, words = line.strip().partition(" ")
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        session.screen.report(f"no such command: {name}; {f'did you mean {near[0]}?' if near else '/help lists them'}")
        return
    try:
        VERBS[name].run(session, words.strip())
    except (UsageError, argparse.ArgumentTypeError) as error:
        session.screen.report(f"error: {name}: {error}")


def _help(session: Session, words: str) -> None:
    rows = [(f"{name} {verb.argument}", verb.help) for name, verb in VERBS.items()]
    rows += [("Ctrl-C", "stops an answer; twice, or Ctrl-D, leaves"), ("\\", "at the end of a line: it goes on")]
    session.screen.report("".join(f"  {name:<{_WIDTH}}{text}\n" for name, text in rows))


def _stats(session: Session, words: str) -> None:
    lines = table("", "", "last answer", "all answers")
    rows = [
        ("tokens", "generated_tokens", ",.0f"),
        ("seconds", "seconds_total", ".2f"),
        ("tokens a second", "goodput", ".1f"),
        ("tokens a step", "mean_accepted_length", ".2f"),
        ("drafted", "drafted_tokens", ",.0f"),
        ("accepted", "accepted_tokens", ",.0f"),
        ("accepted of drafted", "acceptance_rate", ".0%"),
    ]
    for title, name, style in rows:
        lines.add_row(title, *(format(getattr(item, name), style) for item in (session.last, session.total)))
    session.screen.show(lines)


def _reset(session: Session, words: str) -> None:
    session.conversation.messages.clear()
    session.screen.note("A new conversation.\n")


def _system(session: Session, words: str) -> None:
    session.conversation.system = words or None
    session.screen.note("A new system prompt, from now on.\n" if words else "No system prompt.\n")


def _assistant(session: Session, words: str) -> None:
    if words:
        session.use_assistant(assistant_of(words))
    session.screen.note(f"assistant {shown(session.speaker.assistant)}\n")


def _seed(session: Session, words: str) -> None:
    session.seed = not_negative(words) if words else None
    session.screen.note("A new seed for every answer.\n" if session.seed is None else f"seed {session.seed}\n")


def _temperature(session: Session, words: str) -> None:
    session.sampling = session.sampling.at(not_negative_number(words) if words else None)
    session.screen.note(f"temperature {words}\n" if words else "The temperature of the model's own configuration.\n")


def _exit(session: Session, words: str) -> None:
    raise EOFError


VERBS = {
    "/stats": Verb("", "what speculation did, in the last answer and in all", _stats),
    "/reset": Verb("", "begin a new conversation", _reset),
    "/system": Verb("TEXT", "the system prompt; alone: none", _system),
    "/assistant": Verb("NAME", "what drafts: auto, prompt_lookup, none, a folder, ...", _assistant),
    "/seed": Verb("N", "the same conversation again; alone: a new seed always", _seed),
    "/temperature": Verb("X", "0: always the likeliest token; alone: the model's own", _temperature),
    "/help": Verb("", "this list", _help),
    "/exit": Verb("", "leave", _exit),
}
