"""The one error that a user, a file or a machine can cause, and the stop that somebody asked for.

Everything else that raises is a defect of ours.
"""


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
