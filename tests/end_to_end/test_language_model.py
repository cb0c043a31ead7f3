"""The language model's whole life: trained, killed, resumed, evaluated, generating; in one process
and in two; in full and in reduced precision."""

import math
import re
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.end_to_end.cases import in_turn, sampled, usable
from tests.end_to_end.commands import (
    PLUGIN,
    SMALL,
    TASK,
    TRAINING,
    assert_same,
    build,
    last_loss,
    load,
    run,
    run_together,
    saved,
    side_by_side,
    signalled,
    user_dir,
    words,
)
from tests.end_to_end.forked import run_forked

pytestmark = pytest.mark.end_to_end

TRAIN = "fairseq_cli.train"
OPTIONS = {  # none of them the default, so that one that got lost is noticed
    "linear": "--attention-type linear --position-encoding lrpe-type3 "
    "--attention-normalizer layernorm --encoding-seed 5",
    "softmax": "--attention-type softmax --position-encoding lrpe:odd-even:unitary-learned "
    "--encoding-seed 5",
}
SAVED_AT, UPDATES = 40, 80  # an epoch has 33 updates
PROMPTS = ["w1 w2", "w3 w5 w7", "w9", "w4 w4 w4 w4 w4"]
MAX_LENGTH = 16


LIVES = ["linear", pytest.param("softmax", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="session", params=LIVES)
def story(request, corpus, tmp_path_factory):
    """What is left of one model's life."""
    folder = tmp_path_factory.mktemp(request.param)
    whole, broken = folder / "whole", folder / "broken"
    train = [corpus.data, TRAINING, SMALL, OPTIONS[request.param], "--update-epoch-batch-itr True"]
    train += [f"--max-update {UPDATES} --save-interval-updates {SAVED_AT} --save-dir"]
    model = [f"{TASK} --cpu --path", whole / "checkpoint_last.pt"]
    kill = signalled(folder / "killed", SAVED_AT + 1, "SIGKILL")
    _, killed = side_by_side(
        lambda: run(TRAIN, *train, whole),
        lambda: run_forked(TRAIN, words([*train, broken, kill])),
    )
    search = f"--beam 4 --max-len-b {MAX_LENGTH} --buffer-size 9 --batch-size 9"
    logs = side_by_side(
        lambda: run(TRAIN, *train, broken),
        lambda: run("fairseq_cli.eval_lm", corpus.data, *model, "--gen-subset test"),
        lambda: run(
            "fairseq_cli.interactive", corpus.data, *model, search, given="\n".join(PROMPTS) + "\n"
        ),
    )
    left = {"whole": whole, "broken": broken, "status_of_killed": killed.returncode}
    logs = dict(zip(("log_of_resumed", "evaluation", "generation"), logs, strict=True))
    return SimpleNamespace(**left, **logs)


def test_a_training_killed_in_the_middle_resumes_to_the_same_weights_bit_for_bit(story):
    assert story.status_of_killed == -9
    assert re.search(rf"Loaded checkpoint \S+last.pt \(epoch 2 @ {SAVED_AT} ", story.log_of_resumed)
    halfway = saved(story.whole / f"checkpoint_2_{SAVED_AT}.pt")["model"]
    whole, broken = (saved(run / "checkpoint_last.pt") for run in (story.whole, story.broken))
    weight = "decoder.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(halfway[weight], whole["model"][weight])
    for part in ("model", "last_optimizer_state"):
        assert_same(whole[part], broken[part])


def test_evaluation_scores_every_token_with_the_perplexity_computed_by_hand(story, corpus):
    model, task, _ = load(story.whole / "checkpoint_last.pt")
    lines = [task.source_dictionary.encode_line(line) for line in corpus.lines["test"]]
    stream = torch.cat(lines).long()
    before = torch.cat([torch.tensor([task.source_dictionary.eos()]), stream[:-1]])
    blocks = zip(before.split(32), stream.split(32), strict=True)
    bits = -sum(log_probs(model, x, y).sum().item() for x, y in blocks) / math.log(2)
    expected = bits / corpus.token_count("test")
    assert f"Evaluated {corpus.token_count('test')} tokens" in story.evaluation
    loss, perplexity = re.search(r"base 2\): (\S+), Perplexity: (\S+)", story.evaluation).groups()
    assert float(loss) == pytest.approx(expected, abs=1e-4)
    assert float(perplexity) == pytest.approx(2**expected, abs=1e-2)


def test_the_command_line_generates_by_beam_search_what_full_context_scores_the_same(story):
    model, task, _ = load(story.whole / "checkpoint_last.pt")
    hypotheses = re.findall(r"^H-\d+\t(\S+)\t(.*)$", story.generation, re.MULTILINE)
    assert len(hypotheses) == len(PROMPTS)
    for prompt, (score, text) in zip(PROMPTS, hypotheses, strict=True):
        assert text.startswith(prompt)
        tokens = task.source_dictionary.encode_line(text).long()
        mean = teacher_forced(model, task, tokens).mean().item() / math.log(2)
        assert float(score) == pytest.approx(mean, abs=1e-4)


def log_probs(model, before, tokens):
    """Natural log-probability of each of ``tokens``, given the tokens ``before``; both (T,)."""
    with torch.no_grad():
        output = model(before.unsqueeze(0))
    every = model.get_normalized_probs(output, log_probs=True).squeeze(0)
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def teacher_forced(model, task, tokens):
    """Log-probabilities of a sentence by one forward pass over it."""
    start_of_sentence = torch.tensor([task.source_dictionary.eos()])
    return log_probs(model, torch.cat([start_of_sentence, tokens[:-1]]), tokens)


def generate(model, task, beam):
    """For every prompt of one batch, its hypotheses by incremental decoding."""
    lines = [task.source_dictionary.encode_line(line).long() for line in PROMPTS]
    dataset = task.build_dataset_for_inference(lines, [len(line) for line in lines])
    sample = dataset.collater([dataset[i] for i in range(len(lines))])
    generator = task.build_generator([model], Namespace(beam=beam, max_len_b=MAX_LENGTH))
    return task.inference_step(generator, [model], sample)


@pytest.fixture(scope="session")
def untrained(corpus):
    """Builds small models that differ in attention and encoding, in a moment each."""
    _, task, config = build(corpus, SMALL)

    def construct(attention_type, encoding):
        config.model.attention_type, config.model.position_encoding = attention_type, encoding
        torch.manual_seed(0)
        return task.build_model(config.model).eval(), task

    return construct


@pytest.mark.parametrize(("attention_type", "encoding"), sampled(usable(), in_turn("decoder-only")))
def test_a_hypothesis_of_beam_search_has_the_score_of_full_context(
    untrained, attention_type, encoding
):
    model, task = untrained(attention_type, encoding)
    for hypotheses in generate(model, task, beam=4):
        assert len(hypotheses) == 4
        for hypothesis in hypotheses:
            expected = teacher_forced(model, task, hypothesis["tokens"])
            torch.testing.assert_close(hypothesis["positional_scores"], expected, rtol=0, atol=1e-4)
            assert float(hypothesis["score"]) == pytest.approx(expected.mean().item(), abs=1e-4)


def test_a_checkpoint_alone_restores_the_model(story, corpus, request):
    attention_type = request.node.callspec.params["story"]
    checkpoint = story.whole / "checkpoint_last.pt"
    restored, _, config = load(checkpoint)
    typed, _, _ = build(corpus, SMALL, OPTIONS[attention_type])
    typed.load_state_dict(saved(checkpoint)["model"])
    assert config.model.encoding_seed == 5
    for layer, other in zip(restored.decoder.layers, typed.decoder.layers, strict=True):
        ours, theirs = layer.self_attn, other.self_attn
        assert ours.attention_type == theirs.attention_type == attention_type
        assert ours.normalizer == theirs.normalizer
        assert repr(ours.encoding) == repr(theirs.encoding)
        assert ours.encoding.spec == theirs.encoding.spec
    tokens = torch.randint(4, 24, (2, 50))
    assert torch.equal(restored(tokens)[0], typed.eval()(tokens)[0])


def test_the_hub_interface_scores_and_samples_from_a_checkpoint(story, corpus):
    from lrpe_fairseq.models.language_model import LRPELanguageModel

    hub = LRPELanguageModel.from_pretrained(
        str(story.whole), "checkpoint_last.pt", str(corpus.data), user_dir=str(PLUGIN), bpe=None
    )
    scored = hub.score("w1 w2 w3")
    expected = teacher_forced(hub.models[0], hub.task, scored["tokens"])
    torch.testing.assert_close(scored["positional_scores"], expected, rtol=0, atol=1e-5)
    assert hub.sample("w1 w2", beam=2, max_len_b=MAX_LENGTH).startswith("w1 w2")


# plain SGD compares the gradients themselves; Adam divides noise by noise where they vanish, and so
# does the rotated normalizer in heads of 8
TOGETHER = (
    f"{TRAINING} --optimizer sgd --lr 0.1 --dropout 0 --disable-validation --max-tokens 32 {SMALL}"
)
STEPS = 20
STOPS = {  # (attention, processes) -> where the training stops, to go on in so many processes
    ("linear", 2): [(1, 5), (2, STEPS)],
    ("linear", 4): [(2, 5), (4, 13), (1, STEPS)],
    ("softmax", 4): [(4, STEPS)],
}
GROUPS = [
    pytest.param(case, marks=() if case == ("linear", 2) else pytest.mark.exhaustive)
    for case in STOPS
]


@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_a_group_of_processes_trains_as_one_with_the_matching_update_frequency(
    case, corpus, tmp_path
):
    attention, processes = case
    folders = tmp_path / "alone", tmp_path / "together"
    train = [corpus.data, TOGETHER, OPTIONS[attention], "--save-interval-updates 1"]
    run(TRAIN, *train, f"--max-update {STEPS} --update-freq {processes} --save-dir", folders[0])
    for size, stop in STOPS[case]:
        length = f"--max-update {stop} --update-freq {processes // size} --save-dir"
        start_training = partial(run_together, size) if size > 1 else partial(run, TRAIN)
        start_training(*train, length, folders[1])
    alone, together = (
        [folder / f"checkpoint_1_{step}.pt" for step in range(1, STEPS + 1)] for folder in folders
    )
    losses = [last_loss(checkpoint) for checkpoint in alone]
    assert losses[-1] < 0.9 * losses[0]
    assert [last_loss(checkpoint) for checkpoint in together] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(
        saved(together[-1])["model"], saved(alone[-1])["model"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.exhaustive
def test_spe_in_two_processes_draws_two_noises_and_resumes_to_the_bit(corpus, tmp_path):
    """Dropout is 0 and both processes read the same text, so only the noise tells them apart."""
    spe = f"{TOGETHER} --attention-type softmax --position-encoding spe --save-interval-updates 1"
    code = """
import torch
from lrpe_fairseq.encodings.rotations import spe
draw = spe.SineCode.draw
def drawn(self):
    draw(self)
    both = [torch.empty_like(self.drawn) for _ in range(2)]
    torch.distributed.all_gather(both, self.drawn)
    assert not torch.equal(*both)
spe.SineCode.draw = drawn
import lrpe_fairseq.models
"""
    plugin = user_dir(tmp_path / "plugin", code)
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for folder, stops in zip(folders, ((6,), (3, 6)), strict=True):
        for stop in stops:
            given = corpus.data, spe, plugin, f"--max-update {stop} --save-dir", folder
            run_together(2, *given)
    whole, stopped = (saved(folder / "checkpoint_1_6.pt")["model"] for folder in folders)
    assert_same(whole, stopped)


BF16 = f"{TRAINING} {SMALL} --bf16 --disable-validation --save-interval-updates 1 --max-update 20"


@pytest.mark.parametrize("attention", LIVES)
def test_bf16_trains_and_keeps_the_learned_angles_in_float32(attention, corpus, tmp_path):
    run(TRAIN, corpus.data, BF16, OPTIONS[attention], "--save-dir", tmp_path)
    first, last = (tmp_path / f"checkpoint_1_{n}.pt" for n in (1, 20))
    assert last_loss(last) < 0.9 * last_loss(first)
    weights = {k: v for k, v in saved(last)["model"].items() if v.is_floating_point()}
    rounded = {name for name, v in weights.items() if torch.equal(v, v.bfloat16().float())}
    angles = {name for name in weights if ".encoding.core." in name}
    assert angles
    assert not angles & rounded
    assert "decoder.layers.0.self_attn.q_proj.weight" in rounded


@pytest.mark.parametrize(
    "options",
    [
        "--attention-type softmax",
        "--attention-type linear --attention-normalizer content",
        "--attention-type linear --attention-normalizer layernorm",
    ],
)
def test_a_model_in_fp16_computes_what_it_does_in_float32(corpus, options):
    model, _, _ = build(corpus, SMALL, options, "--position-encoding lrpe-type3")
    tokens = torch.randint(4, 24, (2, 300))
    exact = model.eval()(tokens)[0]
    half = model.half()(tokens)[0]
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), exact, rtol=0, atol=0.02)
