"""Command lines in processes of their own, which begin with everything imported."""

import multiprocessing
import os
import signal
import sys
from functools import cache

from hf_smartspec import SmartSpecConfig
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.generate.row_file import RowFile
from hf_smartspec.serving.engine import Engine


def start(target, *args):
    """A process that runs a function of this module."""
    process = _context().Process(target=target, args=args)
    process.start()
    return process


@cache
def _context():
    context = multiprocessing.get_context("forkserver")
    commands = [f"hf_smartspec.commands.{name}" for name in ("generate.command", "chat.command", "serve.serving")]
    context.set_forkserver_preload(["datasets", "accelerate.commands.launch", *commands])
    return context


def _known_lengths():
    """As in all tests: drafts do not depend on what is measured here."""
    SmartSpecConfig.policy_for = lambda config, source: config.policy or config.fixed_policy_for(source)


def run_killed(arguments, moment):
    """Ends by SIGKILL: within its third row ("torn"), behind its second one ("whole"), or before its first."""
    _known_lengths()
    append, written = RowFile.append, []

    def append_and_die(self, row):
        written.append(row)
        if moment == "torn" and len(written) == 3:
            self._file.write(b'{"row": 2, "prom')
            self._file.flush()
            _die()
        append(self, row)
        if moment == "whole" and len(written) == 2:
            _die()

    RowFile.append = append_and_die
    if moment == "before":
        Engine.get_result = lambda *_: _die()
    cli.main(arguments)


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def run_launched(words):
    """`accelerate launch`."""
    from accelerate.commands import launch

    launch.launch_command(launch.launch_command_parser().parse_args(words))


def run_logged(arguments, output):
    """Run a command line whose messages go to a file."""
    sys.stderr = open(output, "w", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(cli.main(arguments))


def run_on_terminal(arguments, device):
    """With that pseudo-terminal as the one that controls it: Ctrl-C there is a signal here."""
    _known_lengths()
    os.setsid()
    terminal = os.open(device, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    os._exit(cli.main(arguments))
