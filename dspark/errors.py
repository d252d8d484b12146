"""The one error that a user, a file or a machine can cause, and the stop that somebody asked for.

Everything else that raises is a defect of ours.
"""

import re

# How a traceback of another process names an InputError.
_IN_TRACEBACK = re.compile(r"^dspark\.errors\.InputError: (.+)$", re.MULTILINE)


class InputError(ValueError):
    """Says what was found, what was needed and what to do; a command prints it without a traceback and exits 2.

    Takes only a message, so that it survives pickling between processes.
    """


class StoppedError(Exception):
    """A run that was asked to stop and has saved where it is; a command prints how to go on and exits 75.

    `folder` is what `--resume` takes.
    """

    def __init__(self, message: str, folder: str) -> None:
        super().__init__(message)
        self.folder = folder


def bad_input(error: BaseException) -> str | None:
    """The message of the InputError that an error is or comes from; None: a defect.

    One that was raised in an actor arrives in errors of Ray: as their `cause`, or only in their text, which holds the
    traceback of the other process.
    """
    met: list[BaseException] = []
    following: BaseException | None = error
    while isinstance(following, BaseException) and following not in met:
        met.append(following)
        following = getattr(following, "cause", None) or following.__cause__
    # The last one first: Ray gives its own errors the type of their cause, and a traceback as their text.
    for one in reversed(met):
        if type(one) is InputError:
            return str(one)
        if type(one).__module__.partition(".")[0] == "ray" and (found := _IN_TRACEBACK.search(str(one))):
            return found[1].strip()
    return None
