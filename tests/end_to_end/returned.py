"""A callback of hydra that writes down what every job returns, as a sweeper would read it."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback


class Record(Callback):
    """Appends one line per job to the file ``path``."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_job_end(self, config: Any, job_return: Any, **more: Any) -> None:
        """Write the value of a job."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{job_return.return_value!r}\n")
