"""`smartspec chat`: a conversation with a model, in the terminal."""

import argparse

from ..common.answering.arguments import sampling_of
from ..common.answering.speaker import load_speaker
from ..common.outputs import check_output, write_json
from .conversation import Conversation
from .screen import Screen
from .session import Session
from .verbs import VERBS, obey


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
