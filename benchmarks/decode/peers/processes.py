"""A peer's process: started with a job, asked line by line (`runners/protocol.py`)."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

RUNNERS = Path(__file__).parent
_SOURCES = Path(__file__).parents[3]  # of this library


class PeerError(Exception):
    """A peer cannot be installed, or failed; its message is shown, and the others go on."""


class Answer(NamedTuple):
    seconds: float
    tokens: list[list[int]]  # the new ones of each row


class PeerProcess:
    """
    A process that loads a model and waits for requests to decode.

    Args:
        python (`Path`): Interpreter of the peer's environment.
        module (`str`): The module to run, such as "runners.llama_cpp".
        job (dict): See `runners/protocol.py`.
        folder (`Path`): Folder for its job and its stderr.
        timeout (`float`): Seconds up to an answer; then the process is ended.

    Raises:
        PeerError: if it cannot load the model.
    """

    def __init__(self, python: Path, module: str, job: dict[str, Any], folder: Path, timeout: float):
        self.timeout, self._is_late = timeout, False
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps(job))
        self._log = folder / "stderr.txt"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", module, str(folder / "job.json")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder, env=_environment(job),
                start_new_session=True,  # what interrupts this process leaves it to be closed
            )  # fmt: skip
        try:
            answer = self._answer()
            self.ways: dict[str, bool] = answer["ways"]  # and whether they take several rows
            self.about: str = answer["about"]
        except BaseException:
            self.close()
            raise

    def decode(self, way: str, rows: Sequence[int]) -> Answer:
        """
        Return the new tokens of these rows of the job's prompts.

        Raises:
            PeerError: if it fails, or takes longer than the timeout.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # where it has ended, its answer tells
            print(json.dumps({"way": way, "rows": list(rows)}), file=self._process.stdin, flush=True)
        return Answer(**self._answer())

    def close(self) -> None:
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # what was asked last has not been read
                stream.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = Timer(self.timeout, self._end)
        timer.start()
        try:
            line = self._process.stdout.readline()
        except BaseException:  # an answer that comes later would be taken for the next one
            self._kill()
            raise
        finally:  # also after an interruption: a running timer keeps Python from ending
            timer.cancel()
        if self._is_late:
            raise PeerError(f"took longer than {self.timeout:g} s")
        if not line:
            raise PeerError(f"ended without an answer, status {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _end(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        """End the process and all that it has started, such as compilers and workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"


def _environment(job: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of a peer: its runners on the path, and its number of threads."""
    paths = [str(RUNNERS), *([str(_SOURCES)] if job["settings"].get("needs_library") else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(job["threads"])}
