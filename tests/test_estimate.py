"""``scripts/run_table.sh TABLE --estimate``: what a table will take, before it is trained."""

import re
from dataclasses import replace

import pytest

from benchmarks import paper_configs
from lrpe_fairseq.experiments.commands import run_table
from lrpe_fairseq.experiments.families import load_named, runs
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.console import format_duration
from lrpe_fairseq.experiments.runner import arithmetic, estimate, identity
from tests.tiny_table import repository
from tests.tiny_table import run_table as run_tiny

PAPER = ["table2", "--scale", "paper", "--estimate", "--on", "v100x8"]
INNER = '2026-01-01 | INFO | train_inner | {{"wps": "9", "ups": "{}", "num_updates": "{}"}}\n'


def options_of(**selected):
    run = next(
        run
        for run in runs(load_named("table2").at("paper"), "paper", [1])
        if all(getattr(run, key) == value for key, value in selected.items())
    )
    return identity.options(identity.resolved(run.settings()))


RoPE = {"label": "RoPE", "attention_type": "linear"}


def test_the_operations_of_table_2_are_those_of_its_products_with_weights():
    options = options_of(**RoPE)
    shape = arithmetic.shape_of(options, 267_744)
    weights, words = 6 * (4 * 512**2 + 2 * 512 * 2048), 267_744 * 512
    assert shape.parameters == weights + words
    attention = 6 * 2 * 64 * 512
    # forward, and twice as many backward; the logits are computed once more
    assert arithmetic.operations(options, shape) == 2 * (3 * (weights + attention) + 4 * words)
    stock = {**options, "criterion._name": "cross_entropy"}
    assert arithmetic.operations(stock, shape) == 2 * 3 * (weights + attention + words)


def test_hours_are_operations_by_the_peak_of_all_devices():
    options = options_of(**RoPE)
    shape = arithmetic.shape_of(options, 267_744)
    every = arithmetic.operations(options, shape) * 65_536 * 50_000
    card = arithmetic.CARDS["v100"]
    alone = arithmetic.need(options, 267_744, card, 1)
    assert alone.seconds == pytest.approx(every / 15.7e12)
    assert arithmetic.need(options, 267_744, card, 8).seconds == alone.seconds / 8
    half = {**options, "common.fp16": True}
    assert arithmetic.need(half, 267_744, card, 1).seconds == pytest.approx(every / 125e12)


def test_three_copies_of_the_logits_do_not_fit_where_blocks_do():
    options, card = options_of(**RoPE), arithmetic.CARDS["v100"]
    stock = {**options, "criterion._name": "cross_entropy"}
    logits = 3 * 4 * 4096 * 267_744
    difference = arithmetic.need(stock, 267_744, card, 8).memory
    difference -= arithmetic.need(options, 267_744, card, 8).memory
    assert difference == logits - 3 * 4 * 2**24
    assert arithmetic.need(stock, 267_744, card, 8).memory > card.memory
    assert arithmetic.need(options, 267_744, card, 8).memory < card.memory


def test_the_estimate_of_a_table_says_that_it_is_arithmetic_and_sums_its_trainings(capsys):
    assert run_table.main([*PAPER, "--seeds", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Arithmetic, nothing is measured: peak figures of 8 v100")
    each = [float(n) for n in re.findall(r"^paper-\S+ +3 +([\d.]+)", said, re.MULTILINE)]
    assert len(each) == 26
    total = re.search(r"78 trainings, one after another on 8 v100: ([\d.]+) hours", said)
    assert float(total[1]) == pytest.approx(3 * sum(each), rel=0.01)


def test_hours_are_of_the_cards_that_the_runner_uses(capsys):
    given = ["table4", "--scale", "paper", "--seeds", "1", "--rows", "RoPE"]
    given += ["--attention", "linear", "--estimate", "--on"]
    hours = {}
    for cards in ("v100x5", "v100x7"):  # an update of eight batches has no seven equal parts
        assert run_table.main([*given, cards]) == 0
        (hours[cards],) = re.findall(r"^paper-\S+ +1 +([\d.]+)", capsys.readouterr().out, re.M)
    assert hours["v100x5"] == hours["v100x7"]


def test_unknown_devices_and_useless_options_are_refused(capsys):
    for arguments, said in (
        ([*PAPER[:-1], "v100"], "--on is a device of v100"),
        ([*PAPER[:-1], "k80x4"], "--on is a device of v100"),
        (["table2", "--on", "v100x8"], "--on needs --estimate"),
        (["table2", "--estimate", "--slurm"], "--estimate measures this machine"),
    ):
        assert run_table.main(arguments) != 0
        assert said in capsys.readouterr().err


def test_without_its_data_a_fine_tuning_says_what_to_prepare_and_is_not_summed(capsys):
    assert run_table.main(["table3", *PAPER[1:], "--seeds", "1", "--columns", "CoLA"]) == 0
    said = capsys.readouterr().out
    script = "data-prep/glue/prepare.py CoLA --tokens-of data/wikitext-103-gpt2"
    assert f"not known before the data are prepared: .venv/bin/python {script} --dest" in said
    assert re.search(
        r"^0 trainings, .*; [1-9]\d* other trainings are not known$", said, re.MULTILINE
    )


def test_translation_of_the_paper_is_estimated_before_its_data_are_prepared(capsys):
    given = ["table4", *PAPER[1:], "--seeds", "1", "--rows", "RoPE"]
    assert run_table.main(given) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"^paper-RoPE-\S+ +1 +[\d.]+ ", said, re.MULTILINE)) == 2
    assert said.splitlines()[-1].startswith("2 trainings, ")
    assert "not known" not in said


def test_encoder_and_decoder_have_a_matrix_of_words_each():
    options = paper_configs.options_of(paper_configs.PAPERS["wmt14-en-de"])
    shape = arithmetic.shape_of(options, 40_000)
    each = 4 * 512**2 + 2 * 512 * 2048
    assert shape.parameters == 12 * each + 6 * 4 * 512**2 + 2 * 40_000 * 512
    shared = arithmetic.shape_of({**options, "model.share_all_embeddings": True}, 40_000)
    assert shared.parameters == shape.parameters - 40_000 * 512


def test_a_classifier_of_pairs_computes_no_words():
    options = paper_configs.options_of(paper_configs.PAPERS["finetune"])
    shape = arithmetic.shape_of(options, 50_264)
    assert shape.predicted == 0
    weights, attention = 12 * (4 * 768**2 + 2 * 768 * 3072), 12 * 2 * 64 * 768
    assert arithmetic.operations(options, shape) == 2 * 3 * (weights + attention)


def test_the_length_of_prepared_pairs_is_their_mean(tmp_path):
    assert estimate.mean_length(tmp_path) == 0
    paper_configs.write_pairs(tmp_path / "bin", words=30, tokens=256)
    assert estimate.mean_length(tmp_path) == paper_configs.PAIR - 4
    paper_configs.write_text(tmp_path / "text" / "bin", words=30, tokens=64)
    assert estimate.mean_length(tmp_path / "text") == 0


def test_one_run_stands_for_all_seeds_of_a_cell():
    found = runs(load_named("table2").at("paper"), "paper", [1, 2, 3])
    cells = estimate.distinct(found)
    assert [trainings for _, trainings in cells] == [3] * 26
    assert {run.seed for run, _ in cells} == {1}


@pytest.fixture(scope="module")
def tiny(corpus, tmp_path_factory):
    return repository(tmp_path_factory.mktemp("estimate") / "checkout", corpus)


def test_a_cell_is_measured_on_this_machine_and_leaves_nothing(tiny):
    said = run_tiny(tiny, "--estimate", "--attention", "linear")
    (line,) = re.findall(r"^tiny-Base-linear +1 +(\S+) +(\S+) +(\S+)$", said, re.MULTILINE)
    hours, peak, disk = map(float, line)
    assert 0 < hours < 1
    assert 0.05 < peak < 10
    assert 0 < disk < 0.1
    assert "1 trainings, one after another on 1 processes of this machine" in said
    assert not (tiny / "runs" / "tiny" / "tiny-Base-linear-seed1").exists()
    assert not list((tiny / "results" / "runs").rglob("*.json"))


def with_log(run, speeds, folder):
    """The run with a log of updates at these speeds, one a line."""
    run = replace(run, folder=folder)
    folder.mkdir()
    text = "".join(INNER.format(speed, n) for n, speed in enumerate(speeds, start=1))
    run.log.write_text(text)
    return run


def test_the_time_left_follows_from_the_logs_of_the_runs_that_have_begun(tmp_path):
    found = runs(load_named("table2").at("paper"), "paper", [1])[:2]
    assert "not known before the first updates" in estimate.time_left(found)
    first = with_log(found[0], [1, 0.5, 0.5], tmp_path / "first")
    assert fairseq_log.seconds_per_update(first.log, 1) == 2
    said = estimate.time_left([first, found[1]])
    seconds = 2 * (2 * 50_000 - 3)
    assert said.startswith(f"time left: {format_duration(seconds)} of training")


def test_the_peak_of_a_gpu_is_its_memory_less_what_was_free(tmp_path):
    log = tmp_path / "log"
    line = '| INFO | train_inner | {"ups": "1", "gb_free": "20.5", "num_updates": "1"}\n'
    log.write_text(f"rank   0: capabilities =  9.0  ; total memory = 79.000 GB ; name = x\n{line}")
    assert fairseq_log.peak_of_gpu(log) == 58.5 * 2**30
    log.write_text(line)
    assert fairseq_log.peak_of_gpu(log) is None
