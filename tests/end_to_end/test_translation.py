"""The translation model's whole life: decoded a token at a time as it was trained, by beam search
in any batch, from a prefix; trained, and read by fairseq's three ways to translate."""

import copy
import json
import random
import shutil
from unittest import mock

import pytest
import torch
from fairseq.data import data_utils
from fairseq.dataclass.configs import GenerationConfig

from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.experiments.commands import eval_mt
from lrpe_fairseq.experiments.families import translation
from lrpe_fairseq.experiments.families.translation import Decoding, TranslationRun, score
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.runner.training import RunFailed
from lrpe_fairseq.models.translation import LRPETransformer
from tests.end_to_end.cases import in_turn, sampled, usable
from tests.end_to_end.commands import PLUGIN, built, run, run_here, save, small_transformer
from tests.end_to_end.forked import ForkedChildren

pytestmark = pytest.mark.end_to_end

TASK = f"--user-dir {PLUGIN} --task translation -s en -t de --cpu"
SMALL = small_transformer(layers=2, inner=64)
TRAINING = (
    f"{TASK} --optimizer adam --lr 3e-3 --max-tokens 512 --num-workers 0 --no-epoch-checkpoints "
    "--log-format simple --criterion label_smoothed_cross_entropy --label-smoothing 0.1"
)
OTHER_NORMALIZERS = [("linear", "lrpe-type2", name) for name in NORMALIZERS if name != "rotated"]
SIDES = ("encoder", "decoder")
CROSS = [("cross", "softmax", "ape", "rotated"), ("cross", "linear", "rope", "content")]
STACKS = [("decoder", "softmax,linear", "rope,fox", "content")]
CASES = [  # (side, attention, encoding, normalizer)
    (side, *case)
    for side in SIDES
    for case in [*((*pair, "rotated") for pair in usable(side)), *OTHER_NORMALIZERS]
] + [*STACKS, *CROSS]
DECODERS = [case for case in CASES if case[0] != "encoder"]
IN_TURN = [
    *((side, *pair, "rotated") for side in SIDES for pair in in_turn(side)),
    *(("decoder", *case) for case in OTHER_NORMALIZERS),
    *STACKS,
    *CROSS,
]
FEW = [
    ("encoder", "linear", "lrpe-type3", "rotated"),
    ("encoder", "softmax", "t5", "rotated"),
    ("decoder", "linear", "permuteformer", "rotated"),
    ("decoder", "linear", "lrpe-type2", "content"),
    ("decoder", "softmax", "transformer-xl", "rotated"),
    *CROSS,
]


def with_cases(default, every):
    """Parameters of a test: ``default`` in ``make test``, ``every`` in ``make test-all``."""
    names = ("side", "attention", "encoding", "normalizer")
    return pytest.mark.parametrize(names, sampled(every, default))


SPLITS = ("train", "valid", "test")
LENGTHS = (9, 5, 1)  # of three sources


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Words to be said again in capitals; two dictionaries."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for split, size in {"train": 400, "valid": 30, "test": 30}.items():
        lines = [[f"w{rng.randrange(12)}" for _ in range(rng.randint(2, 8))] for _ in range(size)]
        (folder / f"{split}.en").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{split}.de").write_text(
            "".join(" ".join(line).upper() + "\n" for line in lines)
        )
    return preprocess("", folder / "data", **{split: folder / split for split in SPLITS})


@pytest.fixture(scope="session")
def model_of(pairs):
    """Builds untrained models that differ in one of the three attentions, in a moment each."""
    _, task, config = built(pairs, TRAINING, SMALL)

    def construct(side, attention, encoding, normalizer):
        options = copy.deepcopy(config.model)
        chosen = {"attention_type": attention, "position_encoding": encoding}
        options[side].update({**chosen, "attention_normalizer": normalizer})
        torch.manual_seed(1)
        return task.build_model(options).eval(), task

    return construct


def sources():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.cat([torch.randint(4, 16, (n,), generator=generator), torch.tensor([2])])
        for n in LENGTHS
    ]


def batch(rows, left_pad=True):
    tokens = data_utils.collate_tokens(rows, 1, 2, left_pad=left_pad)
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "id": torch.arange(len(rows)),
        "net_input": {"src_tokens": tokens, "src_lengths": lengths},
    }


@with_cases([case for case in IN_TURN if case[0] != "encoder"], DECODERS)
def test_decoding_token_by_token_gives_the_logits_of_training(
    model_of, side, attention, encoding, normalizer
):
    model, _ = model_of(side, attention, encoding, normalizer)
    net_input = batch(sources())["net_input"]
    generator = torch.Generator().manual_seed(1)
    previous = torch.cat(
        [torch.full((3, 1), 2), torch.randint(4, 16, (3, 12), generator=generator)], 1
    )
    with torch.no_grad():
        expected, _ = model(**net_input, prev_output_tokens=previous)
        encoded, state = model.encoder(**net_input), {}
        steps = [
            model.decoder(previous[:, : n + 1], encoder_out=encoded, incremental_state=state)[0]
            for n in range(previous.shape[1])
        ]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-5)


@with_cases(IN_TURN, CASES)
def test_beam_search_depends_on_neither_batch_nor_padding_side(
    model_of, side, attention, encoding, normalizer
):
    model, task = model_of(side, attention, encoding, normalizer)
    generator = task.build_generator([model], BEAM)
    rows = sources()
    alone = [generator.generate([model], batch([row]))[0][0] for row in rows]
    for left_pad in (True, False):
        together = generator.generate([model], batch(rows, left_pad))
        for one, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(all_of_them[0]["score"], one["score"], rtol=0, atol=1e-4)
            assert all_of_them[0]["tokens"].tolist() == one["tokens"].tolist()


BEAM = GenerationConfig(max_len_a=0.0, max_len_b=12, beam=4)


@with_cases(FEW, CASES)
def test_a_forced_prefix_is_kept_and_scored_as_training_scores_it(
    model_of, side, attention, encoding, normalizer
):
    model, task = model_of(side, attention, encoding, normalizer)
    generator = task.build_generator([model], BEAM)
    prefix = torch.tensor([[7, 9, 4], [5, 5, 6], [8, 4, 4]])
    sample = batch(sources())
    for row, found in enumerate(generator.generate([model], sample, prefix_tokens=prefix)):
        tokens = found[0]["tokens"]
        assert tokens[:3].tolist() == prefix[row].tolist()
        previous = torch.cat([torch.tensor([2]), tokens[:-1]]).unsqueeze(0)
        with torch.no_grad():
            net = batch([sources()[row]])["net_input"]
            scores = model(**net, prev_output_tokens=previous)[0].log_softmax(-1)[0]
        expected = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(found[0]["positional_scores"], expected, rtol=0, atol=1e-4)


def preprocess(options, dest, **prefixes):
    """Binarize the pairs that begin with these prefixes; the folder."""
    files = " ".join(f"--{split}pref {prefix}" for split, prefix in prefixes.items())
    run("fairseq_cli.preprocess", "-s en -t de --workers 1", options, files, "--destdir", dest)
    return dest


def test_a_joined_dictionary_may_have_one_embedding(pairs, tmp_path):
    prefixes = {split: pairs.parent / split for split in SPLITS}
    joined = preprocess("--joined-dictionary", tmp_path / "joined", **prefixes)
    model, _, config = built(joined, TRAINING, SMALL, "--share-all-embeddings")
    shared = model.encoder.embed_tokens.weight
    assert shared is model.decoder.embed_tokens.weight
    assert shared is model.decoder.output_projection.weight
    save(model, config, tmp_path / "untrained.pt")
    sentences = (pairs.parent / "test.en").read_text().splitlines()[:2]
    ways = translated_three_ways(run_here, tmp_path / "untrained.pt", joined, sentences)
    assert ways[0] == ways[1] == ways[2]


def test_separate_dictionaries_cannot_share_one_embedding(pairs):
    with pytest.raises(SystemExit, match="requires a joined dictionary"):
        built(pairs, TRAINING, SMALL, "--share-all-embeddings")


OPTIONS = (
    " ".join(f"--{side}-position-encoding ape" for side in (*SIDES, "cross"))
    + " --encoder-attention-type softmax --no-token-positional-embeddings"
)
"""Only cross-attention can address the source, which has no absolute positions."""


@pytest.fixture(scope="session")
def trained(pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("translation")
    saving = "--max-update 300 --save-interval-updates 100 --keep-interval-updates 3"
    saving += " --save-interval 999 --validate-interval 999"  # not after each of 40 epochs
    small = small_transformer(layers=1, inner=64)
    train = [pairs, TRAINING, small, OPTIONS, saving, "--dropout 0 --save-dir", folder]
    run("fairseq_cli.train", *train)
    return folder


def translations(output):
    """Sentence -> the best hypothesis that fairseq printed."""
    lines = [line.split("\t") for line in output.splitlines() if line.startswith("H-")]
    return {int(number.removeprefix("H-")): text for number, _, text in lines}


def translated_three_ways(call, checkpoint, pairs, sentences):
    """The same sentences by fairseq-generate, fairseq-interactive and the hub."""
    model = f"--user-dir {PLUGIN} --path {checkpoint} --cpu --beam 4 --max-len-b 12"
    generated = translations(call("fairseq_cli.generate", pairs, model, "--num-workers 0"))
    typed = "".join(sentence + "\n" for sentence in sentences)
    answered = translations(
        call("fairseq_cli.interactive", pairs, model, "-s en -t de", given=typed)
    )
    hub = LRPETransformer.from_pretrained(
        str(checkpoint.parent), checkpoint.name, str(pairs), user_dir=str(PLUGIN), bpe=None
    )
    numbers = range(len(sentences))
    return [
        [generated[n] for n in numbers],
        [answered[n] for n in numbers],
        [hub.translate(sentence, beam=4, max_len_b=12) for sentence in sentences],
    ]


def test_the_three_ways_agree_on_what_was_learned(trained, pairs):
    sentences = (pairs.parent / "test.en").read_text().splitlines()[:6]
    best = trained / "checkpoint_best.pt"
    expected, *others = translated_three_ways(run, best, pairs, sentences)
    assert others == [expected, expected]
    right = [s.upper() == e for s, e in zip(sentences, expected, strict=True)]
    assert sum(right) >= 4, expected


def test_a_run_records_the_updates_of_the_checkpoints_that_it_averages(trained, monkeypatch):
    monkeypatch.setattr(translation, "measure", lambda *_: {})
    run_of = mock.Mock(checkpoints=trained, decoding=Decoding(average=2), evaluations=())
    run_of._averaged.return_value = None, None
    assert TranslationRun.measure(run_of, None) == {"averaged_updates": [100, 200]}


@pytest.fixture
def prepared(pairs, tmp_path):
    """What data-prep leaves, as far as evaluation reads it."""
    data = tmp_path / "data"
    shutil.copytree(pairs, data / "bin")
    (data / "raw").mkdir()
    shutil.copy(pairs.parent / "test.de", data / "raw" / "test.de")
    manifest = {"languages": ["en", "de"], "texts": {"test": "raw/test"}}
    (data / "manifest.json").write_text(json.dumps(manifest))
    return data


def test_the_script_scores_a_checkpoint_or_the_mean_of_the_last(
    trained, prepared, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(eval_mt, "Children", ForkedChildren)
    folder = tmp_path / "trained"
    shutil.copytree(trained, folder)
    given = [str(folder / "checkpoint_last.pt"), str(prepared / "bin"), "--splits", "test"]
    out = ["--out", str(tmp_path / "run.json")]
    assert eval_mt.main([*given, "--average", "2", "--beam", "2", *out]) == 0
    found = read_run(tmp_path / "run.json")
    assert "mean of the last 2 checkpoints, beam 2, length penalty 0.6" in found["protocol"]["beam"]
    assert found["position_encoding"]["encoder"] == "ape"
    assert found["metrics"]["test"]["beam"]["sentences"] == 30
    assert found["metrics"]["test"]["beam"]["chrf"] > 60
    assert "tok:13a" in found["protocol"]["beam"]
    assert "test, beam: bleu" in capsys.readouterr().out
    assert eval_mt.main([*given, "--average", "9", "--beam", "1", *out]) == 0
    there = len(list(folder.glob("checkpoint_*_*.pt")))  # fewer than nine
    said = read_run(tmp_path / "run.json")["protocol"]["beam"]
    assert f"mean of the last {there} checkpoints, beam 1" in said
    assert eval_mt.main([*given, "--average", "1"]) == 0
    assert "one model, beam 4" in read_run(folder / "checkpoint_last.json")["protocol"]["beam"]


def test_what_cannot_be_translated_gets_one_sentence_and_no_result(
    trained, prepared, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(eval_mt, "Children", ForkedChildren)
    checkpoint, out = str(trained / "checkpoint_best.pt"), tmp_path / "run.json"
    options = ["--splits", "test", "--average", "1", "--out", str(out)]

    def said(*given):
        assert eval_mt.main([*given, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("eval_mt: ")
        assert error.count("\n") == 1
        assert not out.exists()
        return error

    assert "nowhere is not prepared" in said(checkpoint, "nowhere")
    words = (prepared / "bin" / "dict.de.txt").read_text()
    lines = (trained / "long.en", trained / "long.de")
    symbol = words.split()[0].lower()
    lines[0].write_text(f"{symbol} " * 1100 + "\n")
    lines[1].write_text("X\n")
    dictionaries = f"--srcdict {prepared}/bin/dict.en.txt --tgtdict {prepared}/bin/dict.de.txt"
    preprocess(dictionaries, tmp_path / "long", test=trained / "long")
    for path in (tmp_path / "long").glob("test*"):
        shutil.copy(path, prepared / "bin")
    error = said(checkpoint, str(prepared))
    assert "longer than the maximum of (1024, 1024)" in error
    assert "--truncate-source" in error
    search = "--gen-subset test --truncate-source --beam 1 --max-len-a 0 --max-len-b 5 --path"
    found = run("fairseq_cli.generate", prepared / "bin", TASK, search, checkpoint)
    source = next(line for line in found.splitlines() if line.startswith("S-0"))
    assert len(source.split("\t")[1].split()) == 1023  # and the end of sentence
    assert "H-0" in found


def test_a_sentence_that_was_not_translated_is_noticed(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "test.de").write_text("eins\nzwei\n")
    manifest = {"languages": ["en", "de"], "texts": {"test": "raw/test"}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "log").write_text("H-1\t-0.5\tzwei\n")
    with pytest.raises(RunFailed, match="1 of 2 sentences"):
        score(tmp_path / "log", tmp_path, "test")
