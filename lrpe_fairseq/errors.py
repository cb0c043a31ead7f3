"""The error for options that a user can correct. This module imports nothing else."""


class ChoiceError(ValueError):
    """An option, name or size given by the user is invalid.

    Its message is one sentence that says what to do. Commands print it without a traceback. All
    other errors keep their traceback.
    """
