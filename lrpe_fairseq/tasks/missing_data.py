"""Refuse a missing or unsupported data folder in one sentence, instead of with a traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq.tasks
from fairseq import utils

from lrpe_fairseq.compat.patching import replace_once
from lrpe_fairseq.errors import refuse


def single_folder(data: str, reader: str) -> Path:
    """Return the data folder ``data``. Raises: Refusal if it is empty or names several shards."""
    if not data:
        refuse(f"{reader} needs a data folder, such as the bin folder that data-prep writes")
    if len(utils.split_paths(data)) > 1:
        refuse(f"{reader} reads a single data folder, not the shards {data}: join them")
    return Path(data)


def explain_missing_data() -> None:
    """Replace ``fairseq.tasks.setup_task``. A second call does nothing."""
    replace_once(fairseq.tasks, "setup_task", _setup_or_explain)


def _setup_or_explain(setup: Callable, *arguments: Any, **keywords: Any) -> Any:
    try:
        return setup(*arguments, **keywords)
    except FileNotFoundError as error:
        path = Path(str(error.filename))
        # any other file that is missing is a defect, and keeps its traceback
        if not path.match("dict*.txt"):
            raise
        refuse(f"{path} does not exist; {_hint(path)}")


def _hint(dictionary: Path) -> str:
    binary = dictionary.parent / "bin"
    if (binary / dictionary.name).exists():
        return f"did you mean {binary}?"
    return "the data must be a folder of fairseq-preprocess, or the bin folder of prepared data"
