"""`smartspec chat` on a terminal: what is drafted has a colour, and Ctrl-C stops the answer, not the program."""

import os
import pty
import re
import select
import time

import pytest

from ...serving.helpers import TIMEOUT
from .. import processes
from ..helpers import EMBEDDED

GREEN, CTRL_C, CTRL_D, UP = "\x1b[32m", "\x03", "\x04", "\x1b[A"


class Terminal:
    """Sends keys, and reads what is shown."""

    def __init__(self, *arguments):
        self._end, device = pty.openpty()
        words = [str(word) for word in ("chat", "--threads", "1", "--device", "cpu", *arguments)]
        self.process = processes.start(processes.run_on_terminal, words, os.ttyname(device))
        self._device = device
        self._seen = ""

    def send(self, keys):
        os.write(self._end, keys.encode())

    def until(self, text):
        """What is shown up to this text, from where the last call stopped."""
        end = time.monotonic() + TIMEOUT
        while text not in self._seen:
            assert time.monotonic() < end and self.process.is_alive(), self._seen
            if select.select([self._end], [], [], 0.1)[0]:
                self._seen += os.read(self._end, 65536).decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before

    def interrupt(self, text):
        """Ctrl-C until this is shown: one that comes as readline begins to wait is seen with the next key only."""
        end = time.monotonic() + TIMEOUT
        while text not in self._seen and time.monotonic() < end:
            self.send(CTRL_C)
            again = time.monotonic() + 5
            while text not in self._seen and time.monotonic() < again:
                if select.select([self._end], [], [], 0.1)[0]:
                    self._seen += os.read(self._end, 65536).decode(errors="replace")
        return self.until(text)

    def close(self):
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        os.close(self._end)
        os.close(self._device)


@pytest.fixture
def chat():
    # An answer that goes on until Ctrl-C comes: the most probable one has no end within these tokens.
    endless = ("--temperature", "0", "--max-new-tokens", "1500")
    terminal = Terminal("--model", EMBEDDED, "--dtype", "float32", "--assistant", "prompt_lookup", *endless)
    yield terminal
    terminal.close()


@pytest.mark.long
@pytest.mark.end_to_end
def test_a_chat_in_a_terminal(chat):
    chat.until("> ")
    chat.send("What is a tree?\n")
    assert GREEN in chat.until(GREEN) + GREEN  # the answer runs, and something was accepted
    chat.send(CTRL_C)
    chat.until("stopped; ")
    assert re.search(r"[1-9]\d* drafted, [1-9]\d* accepted", chat.until("> "))
    chat.send("/temperature 0.5\n")
    chat.until("temperature 0.5")
    chat.until("> ")
    chat.send(UP + UP)
    assert "tree?" in chat.until("tree?") + "tree?"  # from the history
    chat.interrupt("Ctrl-C again, or Ctrl-D, leaves.")
    chat.until("> ")
    chat.send("/sta\t\n")
    chat.until("accepted of drafted")
    chat.until("> ")
    chat.send(CTRL_D)
    chat.process.join(TIMEOUT)
    assert chat.process.exitcode == 0


@pytest.mark.long
@pytest.mark.end_to_end
def test_ctrl_c_twice_leaves(chat):
    chat.until("> ")
    chat.interrupt("leaves.")
    chat.until("> ")
    for _ in range(20):  # a signal that comes as readline begins to wait is seen with the next one only
        chat.send(CTRL_C)
        chat.process.join(3)
        if not chat.process.is_alive():
            break
    assert chat.process.exitcode == 130
