"""One thread per process: the tensors are tiny, and the commands under test inherit it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fcntl
import shutil

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from tests.end_to_end.conftest import corpus  # noqa: F401  (a fixture, for all tests)
from tests.tiny_table import repository, run_table

torch.set_num_threads(1)

LONGEST_FIRST = (
    "test_paper_sizes",
    "test_slurm",
    "test_interruptions",
    "test_preemption",
    "test_experiments",
    "test_readme",
    "test_finetuning",
    "test_translation",
    "test_causal_triton",
    "test_language_model",
    "test_pages",
    "test_segment_recurrence",
)
"""Files that must not be left for the end, when the other worker has nothing to do."""


@pytest.fixture(autouse=True)
def kernels_need_no_proof(monkeypatch):
    """In Triton's interpreter proofs take long, and the tests compare the kernels themselves."""
    from lrpe_fairseq.kernels import proof

    if not torch.cuda.is_available():
        monkeypatch.setattr(proof, "_prove", lambda key, example: True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of LONGEST_FIRST; the order within a file stays."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def undisturbed_table(corpus, tmp_path_factory):  # noqa: F811
    """A checkout whose small table ran without interruptions; once for all pytest workers."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    shared.mkdir(exist_ok=True)
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            shutil.rmtree(shared / "checkout", ignore_errors=True)
            run_table(repository(shared / "checkout", corpus), "--jobs", "2")
            (shared / "done").touch()
    return shared / "checkout"
