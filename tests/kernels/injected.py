"""Kernels that fail or compute something wrong, in place of those of Triton."""

import importlib
from contextlib import contextmanager

import torch

from tests.triton_probe import launched


class OutOfResources(Exception):
    """As Triton's, which needs a card."""

    def __init__(self):
        super().__init__("out of resource: shared memory, Required: 270336, limit: 232448")


def module_of(name):
    return importlib.import_module(f"lrpe_fairseq.kernels.{name}")


def kernels_of(name):
    """The kernels of a module that are launched by themselves."""
    return [kernel for kernel in vars(module_of(name)) if launched(kernel)]


class Injected:
    """Takes the place of a kernel from its launch number ``start`` on, counted from 0."""

    def __init__(self, start=0):
        self.start, self.count, self.launches, self.kernel = start, 0, 0, None

    def __getitem__(self, grid):
        return lambda *args, **constants: self.run(grid, args, constants)

    def run(self, grid, args, constants):
        self.count += 1
        if self.count <= self.start:
            return self.kernel[grid](*args, **constants)
        self.launches += 1
        return self.act(grid, args, constants)

    @property
    def __name__(self):
        return self.kernel.fn.__name__


class Fails(Injected):
    """A kernel that cannot be launched."""

    def act(self, grid, args, constants):
        raise OutOfResources


class Wrong(Injected):
    """A kernel one of whose results is wrong in one number. ``result``: which argument it is."""

    def __init__(self, result, start=0):
        super().__init__(start)
        self.result = result

    def act(self, grid, args, constants):
        self.kernel[grid](*args, **constants)
        given = self.kernel.arg_names.index(self.result)
        x = args[given]
        assert isinstance(x, torch.Tensor)
        x[(*[0] * (x.dim() - 1), 5)] += 1.0


class Misled(Injected):
    """A kernel that is given something else for one argument.

    argument: its name. change: a function of what it should be given.
    """

    def __init__(self, argument, change, start=0):
        super().__init__(start)
        self.argument, self.change = argument, change

    def act(self, grid, args, constants):
        place = self.kernel.arg_names.index(self.argument)
        args = (*args[:place], self.change(args[place]), *args[place + 1 :])
        self.kernel[grid](*args, **constants)


@contextmanager
def replaced(monkeypatch, module, kernel, injected):
    """Put ``injected`` in place of a kernel."""
    found = module_of(module)
    injected.kernel = getattr(found, kernel)
    with monkeypatch.context() as patch:
        patch.setattr(found, kernel, injected)
        yield injected
