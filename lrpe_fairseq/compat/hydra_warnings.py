"""What hydra prints before the sentence that matters."""

import warnings

DEPRECATED_IN_HYDRA = (
    r"\s*(hydra\.experimental\..* is no longer experimental|The version_base parameter is not|"
    r"In '.*': Usage of deprecated keyword|'.*' is validated against ConfigStore|"
    r"The strict flag in the compose API)"
)


def silence_deprecations_of_hydra() -> None:
    """Hide hydra's warnings about how fairseq calls it.

    Break: every command of fairseq prints six of them, 18 lines that no user can act on, before
    the sentence that matters. Only warnings with these texts are hidden.

    fairseq-hydra-train still begins with four lines, which fairseq and hydra print before they
    import anything of this project: that of tensorboardX, the warning about version_base, and two
    of level DEBUG.
    """
    warnings.filterwarnings("ignore", DEPRECATED_IN_HYDRA, UserWarning)
