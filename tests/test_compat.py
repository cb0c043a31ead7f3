"""Each defect of the pinned fairseq is shown without its fix and with it.

A fix acts on the whole process, and the package applies it on import. ``PROBES`` therefore run in a
fork of a process that has imported fairseq only, and in that process with the fixes.
"""

import importlib.util
import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import checkpoint_utils, file_utils, utils
from fairseq.data import data_utils
from fairseq.dataclass import utils as dataclass_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel
from fairseq.models.ema.ema import EMA
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from lrpe_fairseq import compat, safe_loading
from lrpe_fairseq.compat import option_text, resumed_place, safe_checkpoints
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.literals import evaluate_literal
from tests.end_to_end.commands import SMALL, TRAINING, built, environment, load, save

PROBES = {  # the error without the fixes, and code that works with them
    "sample-break-mode eos": ("AttributeError", """
import torch
from fairseq.data import TokenBlockDataset
rows = [torch.tensor([5, 6, 2]), torch.tensor([7, 2])]
blocks = TokenBlockDataset(rows, [3, 2], None, pad=1, eos=2, break_mode="eos")
assert [b.tolist() for b in blocks] == [[5, 6, 2], [7, 2]]
"""),
    "span masks": ("AttributeError", """
from fairseq.data import data_utils
assert data_utils.np.fromiter((n for n in (1, 2)), data_utils.np.int).sum() == 3
"""),
    "processes of torchrun on CPUs": ("AssertionError", """
import os
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import utils
given = dict(MASTER_ADDR="h", MASTER_PORT="1", WORLD_SIZE="2", RANK="1", LOCAL_RANK="1")
try:
    os.environ.update(given)
    config = DistributedTrainingConfig(distributed_world_size=1, tpu=False)
    utils.infer_init_method(config)
    assert config.distributed_init_method == "env://"
    assert (config.distributed_world_size, config.distributed_rank) == (2, 1)
    assert config.distributed_no_spawn
finally:
    for name in given:
        del os.environ[name]
"""),
    "dynamic crf": ("AttributeError", """
import torch
from fairseq.modules import DynamicCRF
crf = DynamicCRF(6, low_rank=2, beam_size=3)
targets = torch.tensor([[1, 2, 3]])
crf(torch.zeros(1, 3, 6), targets, torch.ones(1, 3, dtype=torch.bool))
"""),
    "checkpoint with options in a Namespace and numbers of numpy": ("UnpicklingError", """
import argparse, numpy as np, tempfile, torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
options = argparse.Namespace(arch="roberta", lr=[0.1])
history = [{"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 1}]
extra = {"train_iterator": {}, "best": np.float64(77.6), "counts": np.array([4, 3])}
with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    saved = {"args": None, "options": options, "optimizer_history": history, "extra_state": extra}
    torch.save(saved, file.name)
    state = load_checkpoint_to_cpu(file.name)
loaded = state["extra_state"]
assert (state["options"], loaded["best"], loaded["counts"].tolist()) == (options, 77.6, [4, 3])
"""),
    "characters without a piece": ("AssertionError", """
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
encoder = SentencepieceBPE.__new__(SentencepieceBPE)
pieces = "\u2581caf <0xC3> <0xA9> \u2581<0xF0> <0x9F> \u2581<0x3C>"
assert encoder.decode(pieces) == "caf\u00e9 \ufffd <", encoder.decode(pieces)
"""),
    "resuming in several processes": ("UnpicklingError", """
import argparse, torch
from fairseq.distributed import utils
from omegaconf import OmegaConf
wire, rank = [], 0
def broadcast(tensor, src, group):
    wire.append(tensor.clone()) if rank == src else tensor.copy_(wire.pop(0))
utils.broadcast, utils.get_rank = broadcast, lambda group: rank
cfg = {"model": argparse.Namespace(arch="roberta"), "common": {"seed": 1}}
state = {"cfg": OmegaConf.create(cfg, flags={"allow_objects": True}), "model": {"w": torch.ones(3)}}
device = torch.device("cpu")
sent = utils.broadcast_object(state, src_rank=0, group=None, dist_device=device)
rank = 1
received = utils.broadcast_object(None, src_rank=0, group=None, dist_device=device)
for copy in (sent, received):
    assert copy["cfg"].common.seed == 1 and copy["cfg"].model.arch == "roberta"
    assert copy["model"]["w"].tolist() == [1, 1, 1]
assert not wire
"""),
    "bf16": ("AssertionError", """
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
for flag in ("--bf16", "--memory-efficient-bf16"):
    parser = options.get_training_parser("language_modeling")
    args = options.parse_args_and_arch(parser, ["data", "--arch", "transformer_lm", flag])
    common = convert_namespace_to_omegaconf(args).common
    assert common.bf16 and not common.tpu
"""),
    "num-batch-buckets": ("TypeError", """
from fairseq.data import BucketPadLengthDataset
import torch
rows = [torch.ones(n) for n in (1, 2, 3, 9)]
padded = BucketPadLengthDataset(rows, [1, 2, 3, 9], num_buckets=2, pad_idx=0, left_pad=False)
assert [len(row) for row in padded] == [2, 2, 9, 9]
"""),
    "nested options": ("OverrideParseException", """
from argparse import Namespace
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
register_model("probe", dataclass=TransformerConfig)(type("Probe", (TransformerModelBase,), {}))
given = {"encoder_embed_dim": 8, "decoder_layers": 3, "quant_noise_pq": 0.1, "dropout": 0.2}
model = convert_namespace_to_omegaconf(Namespace(arch="probe", **given)).model
assert (model.encoder.embed_dim, model.encoder.layers) == (8, 6)
assert (model.decoder.embed_dim, model.decoder.input_dim, model.decoder.layers) == (512, 512, 3)
assert (model.quant_noise.pq, model.dropout, model._name) == (0.1, 0.2, "probe")
"""),
    "adaptive softmax with shared embeddings": ("RuntimeError", """
import torch
from argparse import Namespace
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
cfg = TransformerConfig.from_namespace(Namespace(
    decoder_embed_dim=8, decoder_output_dim=8, decoder_layers=0,
    adaptive_softmax_cutoff="2,3", share_decoder_input_output_embed=True,
))
decoder = TransformerDecoderBase(cfg, Dictionary(), torch.nn.Embedding(4, 8, 1), True)
module = torch.nn.ModuleDict({"decoder": decoder})
state = module.state_dict()
names = list(state)
decoder.upgrade_state_dict_named(state, "decoder")
module.load_state_dict(state)
assert list(state) == names
"""),
    "average of a model with integers": ("RuntimeError", """
import torch
from types import SimpleNamespace
from fairseq.models.ema.ema import EMA
model = torch.nn.Linear(1, 1)
model.register_buffer("order", torch.arange(3))
model.register_buffer("vector", torch.full((9,), 0.1))
config = SimpleNamespace(ema_decay=0.3, ema_seed_model=None, ema_fp32=False, ema_update_freq=1)
average = EMA(model, config)
torch.nn.init.constant_(model.weight, 1.0)
torch.nn.init.constant_(average.get_model().weight, 0.0)
for _ in range(9):
    average.step(model)
assert average.get_model().order.tolist() == [0, 1, 2]
assert torch.equal(average.get_model().vector, model.vector)
assert 0.9 < average.get_model().weight < 1
"""),
    "predictions of several processes": ("TypeError", """
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion
logs = [{"pred": [1, 0]}, {"pred": [1]}]
if SentencePredictionCriterion.logging_outputs_can_be_summed():
    sum(log["pred"] for log in logs)  # as Trainer._fast_stat_sync_sum
"""),
    "warnings of hydra": ("AssertionError", """
import warnings
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
command = ["data", "--task", "language_modeling", "--arch", "transformer_lm"]
parsed = options.parse_args_and_arch(options.get_training_parser(), command)
with warnings.catch_warnings(record=True) as said:
    convert_namespace_to_omegaconf(parsed)
assert [str(warning.message) for warning in said] == []
"""),
}  # fmt: skip

RUN = """
import atexit, json, os, sys
import fairseq

def run_probes(report):
    results = {}
    for name, (_, code) in probes.items():
        try:
            exec(code, {})
            results[name] = "works"
        except Exception as error:
            results[name] = type(error).__name__
    json.dump(results, open(report, "w"))

probes = json.load(sys.stdin)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    run_probes("stock")
    os._exit(0)
import torch.distributed as dist
atexit.register(lambda: print("initialized" if dist.is_initialized() else "left"))  # runs last
import lrpe_fairseq.compat
lrpe_fairseq.compat.apply()
store = f"file://{os.getcwd()}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
run_probes("mended")
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What every probe did without ("stock") and with ("mended") the fixes, and the last line."""
    folder = tmp_path_factory.mktemp("probes")
    given = {"cwd": folder, "env": environment(), "input": json.dumps(PROBES)}
    ended = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, check=False, **given
    )
    assert ended.returncode == 0, ended.stderr
    found = {name: json.loads((folder / name).read_text()) for name in ("stock", "mended")}
    return {**found, "said last": ended.stdout.splitlines()[-1]}


@pytest.mark.parametrize("name", PROBES)
def test_fairseq_breaks_here_without_the_fixes_and_works_with_them(outcomes, name):
    assert outcomes["stock"][name] == PROBES[name][0]
    assert outcomes["mended"][name] == "works"


class Attack:
    """Pickles as a call of ``function`` on ``arguments``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class HiddenObjects:
    """Pickles as numpy's dtype of Python objects, its object flag taken away."""

    STATE = (3, "|", None, None, None, -1, -1, 0)

    def __reduce__(self):
        return np.dtype, ("O8", False, True), self.STATE


def load_allowed(path):
    """Load a file with what is allowed for checkpoints of fairseq."""
    with safe_loading.allowed():
        return torch.load(path)


def allowed_names():
    allowed = torch.serialization.get_safe_globals()
    return {g[1] if isinstance(g, tuple) else f"{g.__module__}.{g.__qualname__}" for g in allowed}


def test_names_are_allowed_only_while_a_checkpoint_loads():
    before = allowed_names()
    with safe_loading.allowed(dict):
        within = allowed_names()
    assert allowed_names() == before
    assert within - before == {
        "argparse.Namespace",
        "builtins.dict",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
    }


def test_two_threads_that_load_at_once_leave_nothing_allowed():
    before = allowed_names()
    first_has_left = threading.Event()

    def second():
        with safe_loading.allowed():
            first_has_left.wait(10)

    thread = threading.Thread(target=second)
    with safe_loading.allowed():
        thread.start()
        thread.join(0.1)  # time to enter, if it could
    first_has_left.set()
    thread.join()
    assert allowed_names() == before


def test_what_other_programs_allow_serves_them_and_not_the_checkpoints_of_fairseq(tmp_path):
    """transformers.Trainer allows numpy's own names, and its checkpoints hold numpy's states."""
    torch.save({"counts": np.arange(4)}, tmp_path / "c.pt")
    own = [np.ndarray, np.dtype, type(np.dtype(np.int64)), np._core.multiarray._reconstruct]
    with torch.serialization.safe_globals(own):
        for load_it, kind in ((torch.load, np.ndarray), (load_allowed, safe_loading._NumericArray)):
            counts = load_it(tmp_path / "c.pt")["counts"]
            assert (type(counts), counts.tolist()) == (kind, [0, 1, 2, 3])
        assert np.dtype in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", ">f8"])
def test_numpy_numbers_of_every_type_load_as_they_were_saved(tmp_path, dtype):
    array = np.asfortranarray(np.arange(6).reshape(2, 3).astype(dtype))
    saved = {"array": array, "scalar": array[1, 2]}
    torch.save(saved, tmp_path / "c.pt")
    state, expected = load_allowed(tmp_path / "c.pt"), pickle.loads(pickle.dumps(saved))
    assert state["array"].dtype == expected["array"].dtype
    assert state["array"].tolist() == array.tolist()
    assert state["scalar"] == array[1, 2]
    assert type(state["scalar"]) is type(expected["scalar"])


def test_a_checkpoint_that_numpy_1_wrote_loads(tmp_path):
    new, old = tmp_path / "new.pt", tmp_path / "old.pt"
    torch.save({"counts": np.arange(4), "best": np.float64(0.5)}, new)
    with zipfile.ZipFile(new) as archive, zipfile.ZipFile(old, "w") as target:
        for name in archive.namelist():
            target.writestr(name, archive.read(name).replace(b"cnumpy._core.", b"cnumpy.core."))
    assert old.stat().st_size < new.stat().st_size  # it names another module
    state = load_allowed(old)
    assert state["counts"].tolist() == [0, 1, 2, 3]
    assert state["best"] == 0.5


@pytest.mark.parametrize(
    "function", [os.system, eval, exec, subprocess.Popen, importlib.import_module, utils.eval_bool]
)
def test_a_checkpoint_that_calls_a_function_is_refused(tmp_path, function):
    payload = f"touch {tmp_path}/ran" if function is os.system else f"open('{tmp_path}/ran', 'w')"
    checkpoint = tmp_path / "checkpoint.pt"
    torch.save({"args": None, "best": Attack(function, payload)}, checkpoint)
    with pytest.raises(pickle.UnpicklingError):
        checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}], dtype=object),
        np.array(["text"]),
        np.array([(1, 2.0)], dtype="i4,f8"),
        np.datetime64(0, "s"),
        Attack(np.float64(0).__reduce__()[0], HiddenObjects(), b"A" * 8),
        Attack(np.ndarray, (2,), "O"),
    ],
    ids=["objects", "text", "records", "dates", "hidden objects", "direct construction"],
)
def test_a_checkpoint_holds_no_numpy_but_numbers(tmp_path, value):
    torch.save({"best": value}, tmp_path / "checkpoint.pt")
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        load_allowed(tmp_path / "checkpoint.pt")


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
def test_loading_that_is_not_safe_is_reported(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger=safe_checkpoints.__name__):
        safe_checkpoints.allow_checkpoint_globals()
        assert not caplog.records
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        safe_checkpoints.allow_checkpoint_globals()
    assert "a checkpoint can run code" in caplog.text


def _archive(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def _member(name, **fields):
    member = tarfile.TarInfo(name)
    vars_of = {"size": "type" not in fields, **fields}
    for field, value in vars_of.items():
        setattr(member, field, value)
    return member


@pytest.mark.parametrize(
    "member",
    [
        _member("../outside"),
        _member("model/../../outside"),
        _member("/tmp/outside"),
        _member("model/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        _member("model/hard", type=tarfile.LNKTYPE, linkname="model/model.pt"),
        _member("model/pipe", type=tarfile.FIFOTYPE),
        _member("model/disk", type=tarfile.BLKTYPE),
    ],
    ids=lambda member: f"{member.name} {member.type.decode()}",
)
def test_from_pretrained_refuses_an_archive_that_could_write_elsewhere(tmp_path, member):
    path = _archive(tmp_path / "model.tar.gz", _member("model/model.pt"), member)
    with pytest.raises(tarfile.ReadError, match="is refused: its member") as refusal:
        BaseFairseqModel.from_pretrained(str(path))
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [path]


def test_an_archive_of_files_and_folders_is_extracted(tmp_path):
    folder = _member("model", type=tarfile.DIRTYPE, mode=0o755)
    path = _archive(tmp_path / "model.tar.gz", folder, _member("model/model.pt"))
    extracted = Path(file_utils.load_archive_file(str(path)))
    assert (extracted / "model.pt").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(0.9, 0.98)", (0.9, 0.98)),
        ("10000,60000", (10000, 60000)),
        (" [(512, 3)] * 2 + [(1024, -1)]", [(512, 3), (512, 3), (1024, -1)]),
        ("{'a': None, 'b': True}", {"a": None, "b": True}),
        ("1e-3 / 2", 0.0005),
    ],
)
def test_the_values_that_options_take_are_evaluated(text, value):
    assert evaluate_literal(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("open('ran', 'w') and [4]", "not a literal"),
        ("[4] * 10000000000", "more than 100,000 items"),
        ("8,,16", "not an expression"),
    ],
)
def test_a_checkpoint_whose_options_are_a_program_or_huge_is_refused_in_one_sentence(
    tmp_path, monkeypatch, text, reason
):
    (tmp_path / "dict.txt").write_text("a 1\n")
    monkeypatch.chdir(tmp_path)
    model, _, config = built(tmp_path, TRAINING, SMALL)
    config.model.adaptive_softmax_cutoff = text
    save(model, config, tmp_path / "hostile.pt")
    with pytest.raises(SystemExit, match=reason) as refused:
        load(tmp_path / "hostile.pt")
    assert refused.value.code == 2
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "open",
        "[x for x in (1,)]",
        "(lambda: 1)()",
        "f'{1}'",
        "[1][0]",
        "9**9**9",
    ],
)
def test_an_option_that_is_a_program_is_refused(text):
    with pytest.raises(ValueError, match="not a literal"):
        evaluate_literal(text)


@pytest.fixture(scope="module")
def sources():
    """Name -> source of every module of fairseq that is imported."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    of_fairseq = {k: v for k, v in files.items() if re.match(r"fairseq(\.|$)", k) and v}
    texts = {k: Path(v).read_text("utf-8") for k, v in of_fairseq.items() if v.endswith(".py")}
    assert len(texts) > 300
    return texts


def test_every_module_that_evaluates_the_text_of_options_is_covered(sources):
    evaluates = re.compile(r"(?<![\w.])(?<!def )eval\(")
    found = {name for name, text in sources.items() if evaluates.search(text)}
    assert found == set(option_text.EVALUATING_MODULES)
    assert all(sys.modules[name].eval is evaluate_literal for name in found)


def test_numpy_has_every_name_that_fairseq_uses(sources):
    users = [text for text in sources.values() if "import numpy as np" in text]
    names = {name for text in users for name in re.findall(r"\bnp\.([A-Za-z_]\w*)", text)}
    assert {"int", "float", "compat"} <= names
    assert [name for name in names if not hasattr(np, name)] == []


def test_applying_twice_changes_nothing():
    def patched():
        functions = (dataclass_utils.override_module_args, dataclass_utils._override_attr)
        functions += (data_utils.get_buckets, distributed_utils.broadcast_object, np.compat)
        functions += (TransformerDecoderBase.upgrade_state_dict_named, EMA.__init__)
        functions += (file_utils.tarfile, FairseqTask.filter_indices_by_size)
        functions += (checkpoint_utils.load_checkpoint_to_cpu, Trainer.state_dict)
        functions += (checkpoint_utils.load_model_ensemble_and_task, Trainer.__init__)
        return *functions, frozenset(torch.serialization.get_safe_globals())

    compat.apply()
    before = patched()
    compat.apply()
    for fix in compat.FIXES:
        fix()
    assert patched() == before


@pytest.mark.parametrize("samples", [1, 5, 8, 15, 16, 17])
def test_no_sample_is_dropped_because_of_the_size_of_the_last_batch(samples):
    sizes = np.full(samples, 10)
    for vector in (sizes, None):
        batches = data_utils.batch_by_size(
            np.arange(samples),
            num_tokens_fn=lambda index: 10,
            num_tokens_vec=vector,
            max_tokens=80,
            required_batch_size_multiple=8,
        )
        flat = [index for batch in batches for index in batch]
        assert flat == list(range(samples))
        assert all(len(batch) % 8 == 0 for batch in batches[:-1])
        assert all(len(batch) <= 8 for batch in batches)


def _batches(size, multiple=8, **more):
    limits = {"batch_size": size, "max_tokens": None, "required_batch_size_multiple": multiple}
    return {"processes": 2, "update_freq": [1], **limits, **more}


@pytest.mark.parametrize(
    ("shuffle", "before", "now", "said"),
    [
        (True, _batches(8), _batches(4, processes=4), "--batch-size 8 and 2 processes"),
        (True, _batches(8), _batches(8, multiple=1), "--required-batch-size-multiple 8"),
        (False, _batches(8, max_positions="9"), _batches(8, max_positions="8"),
         "--max-positions 9"),
        (True, _batches(8, random_batches="False"), _batches(8, random_batches="True"),
         "no --random-batches"),
        (False, _batches(8), _batches(8, processes=5), "2 processes"),
        (False, _batches(12), _batches(4), "--batch-size 12"),  # fairseq cuts 12 to 8
        (False, _batches(None, max_tokens=9), _batches(4), "no --batch-size and --max-tokens 9"),
    ],
)  # fmt: skip
def test_batches_that_others_cannot_continue_are_refused_with_those_that_can(
    shuffle, before, now, said
):
    place = {"iterations_in_epoch": 6, "shuffle": shuffle}
    with pytest.raises(Refusal, match=f"resume with {said}, or add --reset-dataloader"):
        resumed_place.convert_place(place, before, now, by_updates=False)


def test_a_rank_over_gloo_leaves_its_process_group_when_it_ends(outcomes):
    assert outcomes["said last"] == "left"
