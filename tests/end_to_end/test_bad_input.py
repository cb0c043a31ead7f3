"""What cannot work is refused in one sentence, without a traceback."""

from argparse import Namespace

import fairseq.models
import fairseq.tasks
import pytest

from tests.end_to_end.commands import (
    PLUGIN,
    SMALL,
    TRAINING,
    build,
    built,
    environment,
    hydra,
    side_by_side,
    words,
    yaml_config,
)
from tests.end_to_end.forked import run_forked
from tests.end_to_end.test_fairseq_features import ADAPTIVE, PAIRS

pytestmark = pytest.mark.end_to_end


def test_a_bad_choice_ends_a_training_with_one_sentence_and_without_a_checkpoint(corpus, tmp_path):
    folder = tmp_path / "checkpoints"
    train = words([corpus.data, TRAINING, SMALL, "--max-update 1 --save-dir", folder])
    encoding = [*train, "--position-encoding", "lrpe-type9"]
    launched = environment(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")  # as torchrun sets them
    read = words(hydra(tmp_path, yaml_config(corpus, folder, {"postion_encoding": "rope"})))
    jobs = {
        "unknown position encoding 'lrpe-type9'; did you mean 'lrpe-type8'? docs/encodings.md has "
        "all names": lambda: run_forked("fairseq_cli.train", encoding),
        "2 processes were started without a process group": lambda: run_forked(
            "fairseq_cli.train", train, environment=launched
        ),
        "unknown model option 'postion_encoding'; did you mean 'position_encoding'?": lambda: (
            run_forked("fairseq_cli.hydra_train", read)
        ),
        f"no configuration 'tiny_' in {tmp_path}": lambda: run_forked(
            "fairseq_cli.hydra_train", ["--config-dir", str(tmp_path), "--config-name", "tiny_"]
        ),
    }
    for expected, ended in zip(jobs, side_by_side(*jobs.values()), strict=True):
        assert ended.returncode == 2
        assert "Traceback" not in ended.stderr + ended.stdout
        *before, sentence = ended.stderr.splitlines()
        assert sentence.startswith(f"lrpe_fairseq: {expected}")
        assert not any(line.startswith("lrpe_fairseq: ") for line in before)
    assert not list(folder.glob("*.pt"))


def test_only_its_weights_can_start_a_training_with_another_encoding(corpus, tmp_path):
    def train(folder, *options):
        given = [corpus.data, TRAINING, SMALL, "--max-update 1 --save-dir", tmp_path / folder]
        return run_forked("fairseq_cli.train", words([*given, *options]))

    last = tmp_path / "first" / "checkpoint_last.pt"
    rope, other = "--position-encoding rope", "--attention-normalizer content"
    assert train("first", rope).returncode == 0
    for options, had, has in (
        ([rope, other], "attention_normalizer=rotated", "attention_normalizer=content"),
        ([rope, "--document-boundary </s>"], "document_boundary=None", "document_boundary=</s>"),
        (["--position-encoding tape --attention-type softmax"],
         "attention_type=linear, position_encoding=rope",
         "attention_type=softmax, position_encoding=tape"),  # other parameters
    ):  # fmt: skip
        ended = train("first", *options)
        assert ended.returncode == 2
        assert f"lrpe_fairseq: {last} was trained with {had}; this training has {has}: choose" in (
            ended.stderr
        )
    assert train("first", rope).returncode == 0
    said = f"{last} was trained with attention_normalizer=rotated; this training has "
    said += "attention_normalizer=content"
    ended = train("second", rope, other, "--finetune-from-model", last)
    assert ended.returncode == 0
    assert said in ended.stdout + ended.stderr
    reset = f"--reset-optimizer --reset-dataloader --reset-meters --restore-file {last}"
    ended = train("reset", rope, other, reset)
    assert ended.returncode == 2
    assert f"lrpe_fairseq: {said}: train with the options of the checkpoint" in ended.stderr
    assert train("reset", rope, "--document-boundary </s>", reset).returncode == 0
    ended = train("third", "--position-encoding fox --finetune-from-model", last)
    assert ended.stderr.endswith(f"{last} do not fit this model: train with its options\n")


@pytest.mark.parametrize("tool", ["eval_lm", "interactive"])
def test_a_command_that_reads_a_checkpoint_asks_for_it(tool, corpus):
    given = words([corpus.data, f"--user-dir {PLUGIN} --task language_modeling"])
    ended = run_forked(f"fairseq_cli.{tool}", given)
    assert ended.returncode == 2
    assert ended.stderr.endswith("lrpe_fairseq: pass --path with the checkpoint to read\n")


def test_data_without_a_dictionary_are_named_with_the_folder_that_has_one(tmp_path, capsys):
    def refused(data):
        with pytest.raises(SystemExit) as refusal:
            fairseq.tasks.setup_task(Namespace(task="language_modeling", data=str(data)))
        assert refusal.value.code == 2
        return capsys.readouterr().err

    (tmp_path / "bin").mkdir()
    assert f"{tmp_path}/dict.txt does not exist; the data must be a folder" in refused(tmp_path)
    (tmp_path / "bin" / "dict.txt").write_text("a 1\n")
    assert f"dict.txt does not exist; did you mean {tmp_path}/bin?" in refused(tmp_path)


LAYERS = "--decoder-layers 4 --no-token-positional-embeddings"
CROSS = "--cross-position-encoding"
NARROW = "--quant-noise-pq 0.1 --quant-noise-pq-block-size 7"
TEXT = {
    "--attention-type linear --position-encoding t5": "position encoding 't5' needs the score "
    "matrix, which linear attention does not compute; use it with softmax attention",
    "--position-encoding lrpe:unknown:rotation": "unknown position encoding",
    "--position-encoding lrpe:identity:unknown": "unknown position encoding",
    "--decoder-attention-heads 5": "width 32 is not divisible by 5 attention heads",
    "--kv-heads 3": "3 heads of keys and values cannot be shared equally by 4 attention heads",
    "--scale-heads --head-dim 5": "--scale-heads scales 4 equal pieces of the width 32, which are "
    "no heads of --head-dim 5: leave one of the two out",
    "--decoder-attention-heads 0": "--decoder-attention-heads must be at least 1 and",
    "--document-boundary book": "--document-boundary 'book' is no symbol of the dictionary",
    "--adaptive-input": "--adaptive-input requires --adaptive-input-cutoff",
    f"{ADAPTIVE} --tie-adaptive-weights --adaptive-input --adaptive-input-cutoff 4": (
        "--tie-adaptive-weights requires equal cutoffs"
    ),
    "--decoder-output-dim 16": "require equal widths, not 32 and 16",
    "--decoder-xformers-att-config {}": "xFormers attention is not supported",
    NARROW: "7 must divide the widths",
    "--attention-type linear,quadratic": "unknown attention type 'quadratic'",
    "--attention-type linear,,softmax": "has an empty value",
    "--attention-type softmax,linear --position-encoding t5": "needs the score matrix",
    "--attention-window 4,x": "--attention-window is a number of tokens, or 0 for all, not 'x'",
    "--attention-window -1": "is a number of tokens, or 0 for all, not '-1'",
    f"{LAYERS} --attention-type softmax,linear --memory-length 8": "requires softmax attention",
    "--attention-parts qk-norm,none": "unknown attention part 'none'; choose none, or a list",
}
TRANSLATION = {
    "--cross-self-attention": "--cross-self-attention is not supported",
    "--share-decoder-input-output-embed --decoder-output-dim 16": "not 32 and 16",
    "--encoder-xformers-att-config {}": "xFormers attention is not supported",
    NARROW: "7 must divide the widths",
    f"--no-cross-attention {CROSS} rope": "--no-cross-attention removes the layers",
    f"{CROSS} fox": "causal attention only; choose another one for an encoder or cross",
    f"--cross-attention-type linear {CROSS} t5": "needs the score matrix",
    "--cross-attention-type linear --load-alignments": "use --cross-attention-type softmax",
    "--encoder-attention-window 4": "an attention window needs causal attention",
    "--cross-attention-window 4": "an attention window needs causal attention",
}


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [("text", *case) for case in TEXT.items()] + [("pairs", *c) for c in TRANSLATION.items()],
)
def test_a_model_that_cannot_be_built_says_why(corpus, pairs, kind, options, reason):
    with pytest.raises(SystemExit, match=reason) as refusal:
        build(corpus, SMALL, options) if kind == "text" else built(pairs, PAIRS, options)
    assert refusal.value.code == 2
    assert "\n" not in str(refusal.value)
