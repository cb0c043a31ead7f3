"""Relative positional encodings for linear and softmax transformers, as a fairseq plugin.

``fairseq-train ... --user-dir lrpe_fairseq`` imports this package, which applies the fixes for
fairseq (``compat``) and registers models, tasks, criterions and optimizers. This happens as soon as
both fairseq and this package are imported, in either order. A program without fairseq can use
``lrpe_fairseq.encodings`` and ``lrpe_fairseq.attention``, which neither import nor patch it.
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
    """Apply the fixes for fairseq, which is loaded, and register models, tasks and the rest."""
    from lrpe_fairseq import compat
    from lrpe_fairseq.compat import configuration_log, preemption

    compat.apply()
    preemption.apply()

    from lrpe_fairseq import criterions, models, optim, tasks  # noqa: F401  (register classes)

    configuration_log.apply()  # last, around what explains errors


def _after_fairseq() -> None:
    """Register models, tasks and the rest after the import of fairseq.

    Nothing is registered if ``compat`` was imported by name: that package imports fairseq, which
    calls this function before the package is complete.
    """
    if "lrpe_fairseq.compat" not in sys.modules:
        _register()


def _after_fairseq_train() -> None:
    """Patch ``fairseq_cli.train``, which may be imported after fairseq and this package."""
    from lrpe_fairseq.compat import preemption

    preemption.apply()


class _AfterImport(MetaPathFinder):
    """An import hook that calls a function after the first import of a module.

    actions: the functions by the name of the module.
    """

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec with the call added, or None for any other module."""
        # popped first: find_spec below asks all finders again, this one included
        action = self.actions.pop(name, None)
        spec = None if action is None else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del spec.loader.exec_module  # so that a reload runs the loader's own
            execute(module)
            action()

        spec.loader.exec_module = exec_module
        return spec


# on import fairseq's speech task warns that tensorboardX is missing, which is not needed here
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

sys.meta_path.insert(0, _AfterImport({"fairseq_cli.train": _after_fairseq_train}))
if sys.modules.get("fairseq") is not None:
    _register()
else:
    sys.meta_path.insert(0, _AfterImport({"fairseq": _after_fairseq}))
