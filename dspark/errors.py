"""The one error that a user, a file or a machine can cause; everything else that raises is a defect of ours."""


class InputError(ValueError):
    """Says what was found, what was needed and what to do; a command prints it without a traceback and exits 2.

    Takes only a message, so that it survives pickling between processes.
    """
