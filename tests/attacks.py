"""Bad inputs and attacks on the commands, and what becomes of each.

Each attack runs in this process. A child process that a command would start counts as accepted
input, so nothing is trained or evaluated here. The outcome to have is one sentence.
"""

import contextlib
import io
import math
import os
import runpy
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lrpe_fairseq.experiments.commands import eval_glue, eval_lm, eval_mt, finetune_glue, run_table
from lrpe_fairseq.experiments.data import bitext, folders
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.families import family_of
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import ROOT, write_json
from lrpe_fairseq.experiments.runner import schedule, slurm
from lrpe_fairseq.experiments.runner.processes import Children
from lrpe_fairseq.experiments.runner.training import TrainingRun
from tests.end_to_end.commands import PLUGIN, SMALL, TRAINING, built, save, small_transformer

WORDS = [f"w{n}" for n in range(20)]
OTHERS = [f"v{n}" for n in range(20)]
LINES = {"train": 40, "valid": 4, "test": 4}
PAIR = ("en", "de")
TRANSLATION = (
    f"--user-dir {PLUGIN} --task translation -s en -t de --cpu --optimizer adam --max-tokens 64 "
    + small_transformer()
)


class Accepted(BaseException):
    """The command went on to its work."""


class Evil:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.mark}'",)


class Lab:
    """Small data folders and checkpoints in ``folder``, made when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = folder / "a-program-ran"

    @cached_property
    def lm_data(self) -> Path:
        return self.text_data("lm", WORDS)

    @cached_property
    def other_data(self) -> Path:
        return self.text_data("others", OTHERS)

    @cached_property
    def mt_data(self) -> Path:
        return self.pair_data("mt", WORDS)

    @cached_property
    def lm(self) -> Path:
        return self.model("lm", self.lm_data, TRAINING, SMALL)

    @cached_property
    def mt(self) -> Path:
        return self.model("mt", self.mt_data, TRANSLATION)

    def text_data(self, name: str, symbols: list[str]) -> Path:
        """A prepared folder of one language with these words."""
        folder = self.folder / "data" / name
        prep.write_binary(self._texts(folder, symbols), folder / "bin")
        write_json(folder / "manifest.json", {"corpus": name, "level": "word"})
        return folder

    def pair_data(self, name: str, symbols: list[str]) -> Path:
        """A prepared folder of parallel text with these words."""
        folder = self.folder / "data" / name
        texts = self._texts(folder, symbols)
        (folder / "bin").mkdir()
        for language in PAIR:
            files = {bitext.binary_name(split, PAIR, language): texts[split] for split in texts}
            own = {folder / "bin" / file: text for file, text in files.items()}
            prep.binarize(own, folder / "bin" / f"dict.{language}.txt")
        content = {"corpus": name, "level": "word", "languages": list(PAIR), "texts": {}}
        write_json(folder / "manifest.json", content)
        return folder

    def model(self, name: str, data: Path, *options: str) -> Path:
        """The best checkpoint of a run folder, with weights that were not trained."""
        folder = self.folder / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        model, _, config = built(data / "bin", *options)
        save(model, config, folder / checkpoints.BEST)
        return folder / checkpoints.BEST

    def changed(self, name: str, data: str = "", weight: float = 0.0) -> Path:
        """The language model with another data folder or weight, in a run folder of its own."""
        state = torch.load(self.lm, weights_only=True)
        state["cfg"]["task"]["data"] = data or state["cfg"]["task"]["data"]
        state["model"]["decoder.embed_tokens.weight"][3, 3] = weight
        return self._stored(state, name)

    def pickled(self) -> Path:
        state = {"cfg": {"model": {}}, "optimizer_history": [Evil(self.mark)]}
        return self._stored(state, "evil")

    def _stored(self, state: dict, name: str) -> Path:
        path = self.folder / "runs" / name / "checkpoints" / checkpoints.BEST
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
        return path

    def zeroed(self, checkpoint: Path) -> Path:
        """A copy of a checkpoint with 2 kB of zeros among its weights."""
        content = bytearray(checkpoint.read_bytes())
        with zipfile.ZipFile(checkpoint) as archive:
            weights = [member for member in archive.infolist() if "/data/" in member.filename]
        largest = max(weights, key=lambda member: member.file_size)
        middle = largest.header_offset + 512
        content[middle : middle + 2048] = bytes(2048)
        return self.written("zeroed.pt", bytes(content))

    def written(self, name: str, content: str | bytes) -> Path:
        path = self.folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def _texts(self, folder: Path, symbols: list[str]) -> dict[str, Path]:
        folder.mkdir(parents=True)
        for split, size in LINES.items():
            lines = (" ".join(symbols[(i + j) % 20] for j in range(6)) for i in range(size))
            (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
        return {split: folder / f"{split}.txt" for split in LINES}


Attacks = dict[str, tuple[Callable[[Lab], int | None], str]]
"""Bad input -> how to provoke it, and a part of the sentence that answers it."""


def answer(provoke: Callable[[Lab], int | None], lab: Lab) -> str:
    """Return what a command wrote before it ended with its status.

    Raises: Accepted if the command went on to its work.
    """
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), _apart():
        try:
            status = provoke(lab)
        except SystemExit as end:  # argparse, and our models, which may log before
            if end.code != 2:
                raise
            return said.getvalue().strip().splitlines()[-1]
    if not status:
        raise Accepted
    return said.getvalue().strip()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Children, schedules, downloads and Slurm are not started."""
    with (
        mock.patch.object(Children, "run", side_effect=Accepted),
        mock.patch.object(schedule.Schedule, "run", side_effect=Accepted),
        mock.patch.object(TrainingRun, "prepare_data"),
        mock.patch.object(folders, "prepare"),
        mock.patch.object(TrainingRun, "require_inputs"),
    ):
        yield


def guarded(work: Callable[[], object]) -> int:
    """``work`` within a command."""
    return command("it")(lambda: work() and None)()


def lm(lab: Lab, checkpoint: Path, data: Path | None = None, options: str = "") -> int:
    return eval_lm.main([str(checkpoint), str(data or lab.lm_data), *options.split()])


def mt(lab: Lab, checkpoint: Path, options: str = "--average 1", data: Path | None = None) -> int:
    return eval_mt.main([str(checkpoint), str(data or lab.mt_data), *options.split()])


def glue_of(lab: Lab, checkpoint: Path) -> int:
    data = lab.folder / "data" / "RTE"
    for file in ("bin/input0/valid.idx", "bin/input0/dict.txt"):
        (data / file).parent.mkdir(parents=True, exist_ok=True)
        (data / file).write_text("a 1\n")
    return eval_glue.main([str(checkpoint), str(data), "valid", "--out", str(lab.folder / "o")])


def tuned(lab: Lab, checkpoint: Path) -> int:
    return finetune_glue.main([str(checkpoint), "RTE"])


def resumed(lab: Lab, checkpoint: Path) -> int:
    """A folder that holds only this checkpoint: training starts over, and says why."""
    folder, said = Path(tempfile.mkdtemp(dir=lab.folder)), []
    shutil.copyfile(checkpoint, folder / "checkpoint_1_5.pt")
    seen = checkpoints.ready_to_resume(folder, said.append)
    print("; ".join(said), file=sys.stderr)
    return 0 if seen else 2


def prepared_again(lab: Lab) -> int:
    """The very folder of the training has the data of other words."""
    checkpoint = lab.changed("again", data=str(lab.other_data / "bin"))
    checkpoints.remember_dictionaries(checkpoint.parent, lab.lm_data)
    return lm(lab, checkpoint, lab.other_data)


def without_manifest(lab: Lab) -> int:
    folder = lab.folder / "no-manifest"
    shutil.copytree(lab.mt_data / "bin", folder / "bin")
    return mt(lab, lab.mt, data=folder)


def truncated(lab: Lab) -> int:
    return lm(lab, lab.written("cut.pt", lab.lm.read_bytes()[:4000]))


CHECKPOINTS: Attacks = {
    f"{door.__name__}: a pickle that runs a program": (
        lambda lab, door=door: door(lab, lab.pickled()),
        "could run code",
    )
    for door in (lm, mt, glue_of, tuned, resumed)
} | {
    "lm: zeros in the weights": (lambda lab: lm(lab, lab.zeroed(lab.lm)), "damaged"),
    "resume: zeros in the weights": (lambda lab: resumed(lab, lab.zeroed(lab.lm)), "damaged"),
    "lm: a truncated checkpoint": (truncated, "does not load: it is truncated"),
    "lm: a translation model": (lambda lab: lm(lab, lab.mt), "not of lrpe_lm"),
    "lm: a diverged model": (lambda lab: lm(lab, lab.changed("x", weight=math.nan)), "diverged"),
    "lm: other words": (lambda lab: lm(lab, lab.lm, lab.other_data), "is not the dictionary"),
    "lm: the data were prepared again": (prepared_again, "is not the dictionary"),
    "lm: a lone factor": (
        lambda lab: lm(lab, lab.lm, None, "--context-factor 4"),
        "needs --context-s",
    ),
    "lm: --out FOLDER": (lambda lab: lm(lab, lab.lm, None, f"--out {lab.folder}"), "is a folder"),
    "mt: a language model": (lambda lab: mt(lab, lab.lm), "not of lrpe_transformer"),
    "mt: data without manifest": (without_manifest, "manifest.json"),
    "mt: --lenpen nan": (lambda lab: mt(lab, lab.mt, "--average 1 --lenpen nan"), "be a finite"),
    "mt: no periodic checkpoint": (lambda lab: mt(lab, lab.mt, "--average 5"), "no periodic"),
    "glue: a language model": (lambda lab: glue_of(lab, lab.lm), "not of lrpe_roberta"),
    "finetune: a language model": (lambda lab: tuned(lab, lab.lm), "not of lrpe_roberta"),
}


def site(lab: Lab, content: str) -> int:
    return guarded(lambda: slurm.load_site(lab.written("slurm.yaml", content), {}))


def sbatch(lab: Lab, script: str) -> int:
    """``run_table --slurm`` with an sbatch of ours; none if ``script`` is empty."""
    bin_dir = Path(tempfile.mkdtemp(dir=lab.folder))
    if script:
        (bin_dir / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
        (bin_dir / "sbatch").chmod(0o755)
    write = mock.patch.object(slurm, "job_script", return_value="")
    with mock.patch.dict(os.environ, PATH=str(bin_dir)), write:
        return guarded(
            lambda: slurm.submit(slurm.planned(lab.folder, "table2", [], {0: "a"}, slurm.Site()))
        )


def without_sbatch(lab: Lab) -> int:
    """``run_table --slurm`` where no program is found, also on a cluster."""
    with mock.patch.dict(os.environ, PATH=str(lab.folder)):
        return run_table.main(["table2", "--slurm"])


REFUSED = {  # by run_table
    "table2 --slurm --jobs 2": "with --slurm, use --gpus-per-node, --time, ",
    "table2 --slurm --minutes 9": "with --slurm, use --gpus-per-node, --time, ",
    "table2 --nodes 2": "--nodes need --slurm",
    "table2 --seeds 0": "at least 1",
    "table2 --minutes 0.5": r"--minutes must be more than 0\.5, to stop and save",
    "table2 --minutes nan": "--minutes must be more than",
    "table2 --gpus 0": "at least 1",
    "table2 --pack /dev/null/x.tar": "/dev/null is no folder that can be written",
    "table2 --pack .": r"\. is a folder: choose another --pack",
    "table2 --rows $(id)": r"table table2 has no row '\$\(id\)'; it has Base",
    "table2 --rows T5 --attention linear": "no cell of table table2 has these --rows, ",
    "table2 --scale huge": "table2 has no scale 'huge'; it has small, annealed, paper",
    "table4 --scale mixed --rows Base T5": "no row 'T5'; it has Base; RoPE; PER",
    "budget --columns 600": "no column '600' at scale annealed; it has 1,800; 5,400",
    "grid --datasets digits": "no data set 'digits' at scale small; it has synthetic-",
    "nothing": "there is no table nothing; there are angles, ape-cifar10, ",
    "configs/tables/table2.yaml": r"table configs/tables/table2\.yaml; did you mean table2\?",
}
SITES = {
    "nodes: 0": "nodes must be an integer",
    "time: 24:00:00": "in quotes",
    "setup: [1, {": r"slurm\.yaml",
    "gpu: 1": "gpu",
}
SCRIPTS = {"": "no sbatch", "exit 3": "sbatch failed with status 3"}
SCRIPTS["echo bad account >&2; exit 1"] = "bad account"
TABLES: Attacks = {
    **{
        f"run_table: {words}": (lambda lab, w=words: run_table.main(w.split()), said)
        for words, said in REFUSED.items()
    },
    "run_table: table2 --slurm": (without_sbatch, "no sbatch"),
    **{f"slurm.yaml: {s}": (lambda lab, s=s: site(lab, s), said) for s, said in SITES.items()},
    **{f"sbatch: {s}": (lambda lab, s=s: sbatch(lab, s), said) for s, said in SCRIPTS.items()},
    **{
        f"configuration: {text}": (
            lambda lab, text=text: guarded(lambda: family_of(lab.written("c.yaml", text))),
            r"c\.yaml",
        )
        for text in ("task: [1, {", "model: {}")
    },
}


def broken_manifest(lab: Lab) -> int:
    folder = Path(tempfile.mkdtemp(dir=lab.folder)) / "wikitext-2-bpe"
    shutil.copytree(lab.lm_data, folder)
    (folder / "manifest.json").write_text('{"corpus": "wiki')
    return guarded(lambda: folders.verify(folder))


def destination(lab: Lab, dest: Path) -> int:
    """A data-prep script with this ``--dest``."""
    main = runpy.run_path(str(ROOT / "data-prep" / "multi30k" / "prepare.py"))["main"]
    return main(["--dest", str(dest), "--from", str(lab.folder)])


DEST = "choose another --dest"
DATA: Attacks = {
    "data: a truncated manifest": (broken_manifest, r"manifest\.json is not valid JSON"),
    "--dest: a file": (lambda lab: destination(lab, lab.written("d", "")), DEST),
    "--dest: cannot be written": (lambda lab: destination(lab, Path("/proc/lrpe")), DEST),
}

ATTACKS = {**CHECKPOINTS, **TABLES, **DATA}
