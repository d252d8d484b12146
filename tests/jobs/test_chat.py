"""A chat on a tiny target: what is remembered, what an error costs, and a real terminal with its keys."""

import fcntl
import io
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from jobs.assistant import Wish
from jobs.generate import generate
from tests.jobs.test_generate import plain_text, target_in, tiny_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("chat"))


def test_a_chat_goes_on_from_its_own_answers_until_it_is_reset(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, folder = folders
    typed = ["", "again", "/nothing at all", "x" * 600, "more", "/reset", "Hi", "/exit", "never asked"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
    generate(checkpoint, "Hi", None, True, Wish(max_new_tokens=8, system="S"))
    shown = capsys.readouterr()
    target = target_in(folder)
    asked, wanted = [("system", "S")], []
    for question in ("Hi", "again", "more"):  # the one that was too long is not in the way of the next
        asked.append(("user", question))
        wanted.append(plain_text(target, *asked, tokens=8))
        asked.append(("assistant", wanted[-1].rstrip("\ufffd")))  # what the cap cut off within a character
    assert shown.out == "".join(f"{answer}\n" for answer in [*wanted, wanted[0]])
    assert "there is no /nothing" in shown.err and "a new conversation" in shown.err
    assert shown.err.count("acceptance length 1.") == 4
    assert re.search(r"error: the conversation has \d+ tokens and the target 512 positions", shown.err)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator["Typist"]:
    """`dspark generate` with a terminal of its own, 100 columns wide, as its controlling one."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.generate", *arguments], stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=_in_front,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(slave)
    try:
        yield Typist(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _in_front() -> None:
    """Makes this process one that a user started at a terminal: a shell ignores Ctrl-C for those behind `&`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Typist:
    """Types into a terminal and waits for what it shows."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self.master, self.process, self.shown = master, process, ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C until the pattern shows: one just before the program waits for a key is seen at the next key."""
        for _ in range(20):
            self.type("\x03")
            with suppress(AssertionError):
                self.wait(pattern, 3)
                return
        raise AssertionError(f"no {pattern!r}, however often it was asked")

    def wait(self, pattern: str, timeout_s: float = 240) -> None:
        """Until the pattern stands behind what earlier waits found."""
        start, end = len(self.shown), time.monotonic() + timeout_s
        while not re.search(pattern, self.shown[start:]):
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} after {timeout_s} s in {self.shown[start:]!r}"
            try:
                self.shown += os.read(self.master, 1 << 16).decode(errors="replace")
            except OSError:  # the process has ended
                raise AssertionError(f"ended without {pattern!r}: {self.shown[start:]!r}") from None


def test_at_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(folders: tuple[Path, Path]) -> None:
    with terminal(str(folders[0]), "--max-new-tokens", "450") as user:
        user.wait(r"/help says this again[\s\S]*> ")
        assert "\x1b[32mgreen\x1b[0m" in user.shown
        user.type("Hi\n")
        user.wait(r"acceptance length \d\.\d\d over \d+ rounds")  # while it is still answering
        user.type("\x03")
        user.wait(r"; stopped[\s\S]*> ")
        user.type("half a line")
        user.wait("half a line")
        user.interrupt(r"\n[\s\S]*> ")
        user.type("/reset\n")
        user.wait(r"a new conversation[\s\S]*> ")
        user.type("/exit\n")
        assert user.process.wait(30) == 0
