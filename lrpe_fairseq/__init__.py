"""Relative positional encodings for linear and softmax transformers, as a fairseq plugin.

``fairseq-train ... --user-dir lrpe_fairseq`` imports this package, which then mends fairseq and
registers the models and tasks. That happens once fairseq is loaded, in either order of imports.
A program that never imports fairseq can use ``lrpe_fairseq.encodings`` and
``lrpe_fairseq.attention``: they import and patch nothing of it.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _register() -> None:
    """Mend fairseq and register models and tasks; fairseq is loaded."""
    from lrpe_fairseq import compat, preemption

    compat.apply()
    preemption.apply()

    from lrpe_fairseq import models, tasks  # noqa: F401  (registers archs and tasks)


def _after_fairseq() -> None:
    """Called when fairseq has been loaded.

    Whoever imports ``compat`` or ``preemption`` by name loads fairseq in the middle of that import,
    when nothing of them can be used yet. They patch nothing by being imported.
    """
    if not {"lrpe_fairseq.compat", "lrpe_fairseq.preemption"} & sys.modules.keys():
        _register()


def _after_fairseq_train() -> None:
    """``fairseq_cli.train`` may be imported after fairseq and this package."""
    from lrpe_fairseq import preemption

    preemption.apply()


class _AfterImport(MetaPathFinder):
    """Calls a function after a module is imported for the first time."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, with the call added; None for any other module."""
        action = self.actions.pop(name, None)
        spec = None if action is None else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del spec.loader.exec_module
            execute(module)
            action()

        spec.loader.exec_module = exec_module
        return spec


# at import its speech task asks for tensorboardX, which is not needed here
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

sys.meta_path.insert(0, _AfterImport({"fairseq_cli.train": _after_fairseq_train}))
if sys.modules.get("fairseq") is not None:
    _register()
else:
    sys.meta_path.insert(0, _AfterImport({"fairseq": _after_fairseq}))
