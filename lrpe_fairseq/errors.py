"""The error for choices that a user can correct. It imports nothing, so every room may use it."""


class ChoiceError(ValueError):
    """An option, name or size that the user chose is not possible.

    Its message is one sentence that says what to do. Commands print the sentence without a
    traceback; every other error keeps its traceback.
    """
