"""Segment recurrence (Transformer-XL, Section 3.2): streams of text, read in segments with a memory
of those before; in training, resumed or not, and in evaluation."""

import logging
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm
from torch import Tensor

from lrpe_fairseq.attention.multihead import Memory, MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS
from lrpe_fairseq.tasks.truncated_bptt import Streams, document_starts
from tests.end_to_end.cases import computes
from tests.end_to_end.commands import (
    PLUGIN,
    SMALL,
    TRAINING,
    assert_same,
    build,
    last_loss,
    run,
    saved,
    side_by_side,
)

pytestmark = pytest.mark.end_to_end

STREAMS = "--task lrpe_truncated_bptt_lm --no-token-positional-embeddings"
SOFTMAX = "--attention-type softmax --position-encoding"
XL = f"{STREAMS} {SOFTMAX} transformer-xl"
SEGMENT = 8
EXACT = {"rtol": 1e-6, "atol": 1e-6}  # of double precision: 1e9 roundings
ALL = 10_000  # a memory that holds everything

Batch = dict[str, Any]


def built(corpus, *arguments, memory=ALL, split="valid"):
    """A model in double precision without dropout, and its task with a split loaded."""
    given = [SMALL, "--dropout 0", XL, f"--memory-length {memory}", *arguments]
    model, task, _ = build(corpus, *given, f"--tokens-per-sample {SEGMENT}")
    task.load_dataset(split)
    return model.double().eval(), task


def batches(task, split="valid", **how):
    """What fairseq reads of a split, as a trainer asks for it."""
    how = {"max_tokens": 3 * SEGMENT, "max_positions": SEGMENT, **how}
    iterator = task.get_batch_iterator(task.dataset(split), **how)
    return list(iterator.next_epoch_itr(shuffle=True))


def segment(blocks, stream=0, first=False):
    return {"stream": stream, "blocks": blocks, "first": first}


def text(corpus, split="valid"):
    """Every token of a split, line ends included, as numbers."""
    _, task = built(corpus, split=split)
    lines = range(len(corpus.lines[split]))
    return torch.cat([task.dataset(split).dataset.dataset[i] for i in lines])


XL_AND_T5 = [(name, memory) for name in ("transformer-xl", "t5") for memory in (0, 64)]


def attention(name, attention_type="softmax", causal=True):
    torch.manual_seed(0)
    module = MultiheadAttention(
        16, 2, attention_type=attention_type, position_encoding=name, causal=causal
    )
    for parameter in module.encoding.parameters():  # tables that start at zero say nothing
        torch.nn.init.normal_(parameter)
    return module.double().eval()


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *((name, 5) for name in (*ENCODINGS, "gated:rope") if computes("softmax", name)),
        ("rope", 0),
        *XL_AND_T5,
    ],
)
def test_attention_after_a_memory_is_that_of_one_long_block(name, memory):
    module, length = attention(name), 7
    x = torch.randn(2, memory + length, 16, dtype=torch.float64)
    weight = torch.randn(2, length, 16, dtype=torch.float64)
    before, now = x[:, :memory], x[:, memory:].requires_grad_()
    long = module.attend(torch.cat([before, now], 1))[0][:, memory:]
    after = module.attend(now, state=Memory(before.transpose(0, 1)))[0]
    torch.testing.assert_close(after, long, **EXACT)
    learned = [now, *(p for p in module.parameters() if p.requires_grad)]
    expected, found = (
        torch.autograd.grad((out * weight).sum(), learned, materialize_grads=True)
        for out in (long, after)
    )
    assert any(gradient.any() for gradient in expected[1:])
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["rope", "t5", "alibi", "fox", "path", "selective:rope", "cope"])
def test_padding_after_a_memory_is_hidden(name, documents):
    module, memory, length = attention(name), 5, 7
    before, now = torch.randn(2, memory + length, 16, dtype=torch.float64).tensor_split([memory], 1)
    mask = torch.tensor([[1, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 1]]).bool()
    numbers = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]).repeat(2, 1)
    numbers[:, memory:][mask] = -1
    past = Memory(before.transpose(0, 1), numbers if documents else None)
    other = now.masked_fill(mask.unsqueeze(-1), 9.0)
    out, again = (module.attend(x, mask, past)[0][~mask] for x in (now, other))
    torch.testing.assert_close(out, again, rtol=0, atol=0)
    for row, padded in enumerate(mask):  # a row alone, without its padding
        shown = torch.cat([torch.zeros(memory).bool(), padded])
        kept = Memory(past.inputs[:, row : row + 1], numbers[row : row + 1, ~shown])
        kept = kept if documents else kept._replace(segments=None)
        alone = module.attend(now[row : row + 1, ~padded], state=kept)[0][0]
        found = module.attend(now, mask, past)[0][row, ~padded]
        torch.testing.assert_close(found, alone, **EXACT)


@pytest.mark.parametrize(("attention_type", "causal"), [("linear", True), ("softmax", False)])
def test_attention_that_cannot_remember_says_so(attention_type, causal):
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="only causal softmax attention has a memory"):
        attention("rope", attention_type, causal).attend(x, state=Memory(x.transpose(0, 1)))


def embedded(model, tokens, **given):
    """Features of ``tokens`` and the embeddings they came from."""
    seen: list[Tensor] = []
    hook = model.decoder.embed_tokens.register_forward_hook(lambda *call: seen.append(call[-1]))
    features = model(tokens, features_only=True, **given)[0]
    hook.remove()
    return features, seen[0]


def gradient_of(features, weight, inputs):
    """By ``backward``: activations that are computed again know no other way."""
    inputs.retain_grad()
    (features * weight).sum().backward()
    return inputs.grad


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "model_options",
    [
        "",
        "--no-decoder-normalize-before",
        "--checkpoint-activations",
        f"{SOFTMAX} permuteformer",
        f"{SOFTMAX} fire --fire-length 4 --document-boundary w1",
    ],
)
def test_segments_with_memory_are_one_long_segment(corpus, model_options, training):
    model, _ = built(corpus, model_options)
    tokens = torch.randint(4, 24, (2, 3 * SEGMENT))
    long, inputs = embedded(model.eval(), tokens)
    weight = torch.randn_like(long[:, -SEGMENT:])
    expected = gradient_of(long[:, -SEGMENT:], weight, inputs)
    model.train(training)
    found = []
    for i, part in enumerate(tokens.split(SEGMENT, 1)):
        features, inputs = embedded(model, part, segment=segment([i, 9 + i], first=i == 0))
        found.append(features)
    torch.testing.assert_close(torch.cat(found, 1), long, **EXACT)
    gradient = gradient_of(features, weight, inputs)
    torch.testing.assert_close(gradient, expected[:, -SEGMENT:], **EXACT)


@pytest.mark.parametrize("memory", [5, SEGMENT, 12])
def test_a_segment_sees_as_many_tokens_before_it_as_the_memory_is_long(corpus, memory):
    model, _ = built(corpus, "--decoder-layers 1", memory=memory)
    tokens = torch.randint(4, 24, (2, 3 * SEGMENT))
    for i, part in enumerate(tokens.split(SEGMENT, 1)):
        found = model(part, segment=segment([i, 9 + i], first=i == 0))[0]
        end = (i + 1) * SEGMENT
        window = tokens[:, max(0, i * SEGMENT - memory) : end]
        torch.testing.assert_close(found, model(window)[0][:, -SEGMENT:], **EXACT)
    nearer = model(tokens[:, 2 * SEGMENT - memory + 1 :])[0][:, -SEGMENT:]
    assert (found - nearer).abs().max() > 1e-4


def test_no_gradient_flows_into_earlier_segments(corpus):
    model, _ = built(corpus)
    tokens = torch.randint(4, 24, (2, SEGMENT))
    _, earlier = embedded(model.train(), tokens, segment=segment([0, 9], first=True))
    features, now = embedded(model, tokens, segment=segment([1, 10]))
    assert not model.decoder.memory.recall(segment([2, 11]), True, now).inputs.requires_grad
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(features.sum(), earlier)


SIZES = [(1, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 3), (1, 2, 2), (50, 2, 1)]


def rounds(task, rows, shards, updates):
    """What each of ``shards`` processes reads in training, ``updates`` batches an update."""
    task.args.train_subset, task.args.update_freq = "valid", [updates]
    return [
        batches(task, max_sentences=rows, max_tokens=None, num_shards=shards, shard_id=shard)
        for shard in range(shards)
    ]


@pytest.mark.parametrize(("rows", "shards", "updates"), SIZES)
def test_every_token_is_predicted_once_and_each_row_goes_on_where_its_stream_was(
    corpus, rows, shards, updates
):
    _, task = built(corpus)
    targets = text(corpus)
    eos, pad = task.dictionary.eos(), task.dictionary.pad()
    sources = torch.cat([torch.tensor([eos]), targets[:-1]])
    times = torch.zeros_like(targets)
    assert len(targets) % SEGMENT  # the last segment is a partial one
    per_stream: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    for shard, read in enumerate(rounds(task, rows, shards, updates)):
        for batch in filter(None, read):
            where = batch["net_input"]["segment"]
            for row, block in enumerate(where["blocks"]):
                place = slice(block * SEGMENT, (block + 1) * SEGMENT)
                real = batch["target"][row] != pad
                times[place] += 1
                assert torch.equal(batch["target"][row][real], targets[place])
                assert torch.equal(batch["net_input"]["src_tokens"][row][real], sources[place])
                stream = per_stream.setdefault((shard, where["stream"] + row), [])
                stream.append((block, where["first"]))
    assert (times == 1).all()
    lengths = {len(read) for read in per_stream.values()}
    assert len(per_stream) == min(rows * shards * updates, len(task.dataset("valid")))
    assert max(lengths) - min(lengths) <= 1
    for blocks, firsts in (zip(*read, strict=True) for read in per_stream.values()):
        assert list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))
        assert firsts == (True,) + (False,) * (len(firsts) - 1)


@torch.no_grad()
def predictions(model, read):
    """What ``model`` says of every word, for each target of each block."""
    found = {}
    for batch in read:
        scores = model(**batch["net_input"])[0]
        for row, block in enumerate(batch["id"].tolist()):
            real = batch["target"][row] != model.decoder.padding_idx
            found[block] = scores[row][real]
    return found


@torch.no_grad()
def alone(model, tokens, eos):
    """What ``model`` says for each of ``tokens`` as one segment without memory."""
    source = torch.cat([torch.tensor([eos]), tokens[:-1]])
    return model(source.unsqueeze(0))[0][0]


def test_the_memory_is_carried_from_batch_to_batch(corpus):
    model, task = built(corpus)
    found = predictions(model, batches(task))
    plan, whole = Streams(len(found), 3), text(corpus)
    for stream in range(3):
        blocks = range(plan.start(stream), plan.start(stream + 1))
        tokens = whole[blocks[0] * SEGMENT : (blocks[-1] + 1) * SEGMENT]
        source = whole[blocks[0] * SEGMENT - 1] if stream else task.dictionary.eos()
        expected = alone(model, tokens, int(source))
        torch.testing.assert_close(torch.cat([found[b] for b in blocks]), expected, **EXACT)


def assert_equal(found, expected):
    """True if the blocks of ``expected`` and ``found`` are equal."""
    assert_same({block: found[block] for block in expected}, expected)


def test_a_new_model_and_a_new_epoch_and_another_batch_size_begin_with_nothing(corpus, caplog):
    model, task = built(corpus)
    read, wider = batches(task), batches(task, max_tokens=4 * SEGMENT)
    epoch = predictions(model, read)
    assert_equal(predictions(model, read), epoch)
    forgetful, _ = built(corpus, memory=0)
    model, _ = built(corpus)
    assert_equal(predictions(model, [read[1]]), predictions(forgetful, [read[1]]))
    assert "no memory is stored for the text before" in caplog.text
    predictions(model, [read[0]])
    assert_equal(predictions(model, [wider[1]]), predictions(forgetful, [wider[1]]))
    predictions(model, [read[0]])
    read[1]["net_input"]["segment"]["first"] = True  # as where one split ends and another begins
    assert_equal(predictions(model, [read[1]]), predictions(forgetful, [read[1]]))


def test_an_evaluation_within_a_training_leaves_no_trace(corpus):
    model, task = built(corpus)
    first, second, *rest = batches(task)
    expected = predictions(model.train(), [first, second])
    evaluated = predictions(model.eval(), [first, second, *rest])
    predictions(model.train(), [first])
    assert_equal(predictions(model.eval(), [first, second, *rest]), evaluated)
    assert_equal(
        predictions(model.train(), [second]), {b: expected[b] for b in second["id"].tolist()}
    )


def test_generation_and_plain_batches_neither_see_nor_change_the_memory(corpus):
    model, task = built(corpus)
    first, second, *_ = batches(task)
    expected = predictions(model, [first, second])
    tokens = torch.randint(4, 24, (3, SEGMENT))
    predictions(model, [first])
    state: dict = {}
    steps = [model(tokens[:, : i + 1], incremental_state=state)[0] for i in range(SEGMENT)]
    plain = model(tokens)[0]
    torch.testing.assert_close(torch.cat(steps, 1), plain, **EXACT)
    forgetful, _ = built(corpus, memory=0)
    assert_same(plain, forgetful(tokens)[0])
    assert_equal(predictions(model, [second]), {b: expected[b] for b in second["id"].tolist()})


DOCUMENT_LINES = [1, 4, 5, 19]


@pytest.mark.parametrize("encoding", ["transformer-xl", "permuteformer"])
def test_a_document_is_read_as_if_it_stood_alone_when_asked(corpus, tmp_path, encoding):
    rows = [f"{line}\tTitle {i}\n" for i, line in enumerate(DOCUMENT_LINES)]
    (tmp_path / "valid.tsv").write_text("".join(rows))
    given = f"{SOFTMAX} {encoding} --reset-at-documents {tmp_path}"
    model, task = built(corpus, given)
    found = predictions(model, batches(task, max_tokens=SEGMENT))  # one stream
    scores = torch.cat([found[block] for block in sorted(found)])
    sizes = task.dataset("valid").dataset.dataset.sizes
    bounds = [0, *np.cumsum(sizes)[np.array(DOCUMENT_LINES) - 1], sum(sizes)]
    whole, eos = text(corpus), task.dictionary.eos()
    for start, end in pairwise(bounds):
        expected = alone(model, whole[start:end], eos)
        torch.testing.assert_close(scores[start:end], expected, **EXACT)
    mixed, task = built(corpus, f"{SOFTMAX} {encoding}")
    other = predictions(mixed, batches(task, max_tokens=SEGMENT))
    assert (torch.cat([other[block] for block in sorted(other)]) - scores).abs().max() > 1e-4


@pytest.mark.parametrize("rows", ["0\ta\n0\tb\n", "3\ta\n2\tb\n", "-1\ta\n", "30\ta\n", "x\ta\n"])
def test_documents_of_another_text_are_refused(tmp_path, rows):
    (tmp_path / "valid.tsv").write_text(rows)
    with pytest.raises(ValueError, match=r"valid\.tsv"):
        document_starts(tmp_path / "valid.tsv", np.full(30, 7))
    with pytest.raises(ValueError, match=r"test\.tsv does not list the starts of documents"):
        document_starts(tmp_path / "test.tsv", np.full(30, 7))


MEMORY = 2 * SEGMENT
TRAINED = f"{TRAINING} {SMALL} {XL} --tokens-per-sample {SEGMENT} --memory-length {MEMORY}"
STOP, END = 60, 120  # in the middle of an epoch, which has 37 updates
SAVED = f"--save-interval-updates {STOP // 3} --lr 1e-2"


@pytest.fixture(scope="session")
def trainings(corpus, tmp_path_factory):
    """One training as it is, one stopped in the middle of an epoch and resumed; dropout on."""
    folder = tmp_path_factory.mktemp("segments")
    train = [corpus.data, TRAINED, SAVED, "--max-tokens 64 --update-freq 2 --save-dir"]

    def interrupted():
        for end in (STOP, END):
            run("fairseq_cli.train", *train, folder / "resumed", f"--max-update {end}")

    whole = [*train, folder / "whole", f"--max-update {END}"]
    side_by_side(lambda: run("fairseq_cli.train", *whole), interrupted)
    return {name: folder / name for name in ("whole", "resumed")}


def test_a_resumed_training_is_the_uninterrupted_one(trainings):
    updates = {
        path.name: int(path.stem.split("_")[-1])
        for path in trainings["whole"].glob("checkpoint_*_*.pt")
    }
    assert sorted(updates.values()) == list(range(STOP // 3, END + 1, STOP // 3))
    for name in [*updates, "checkpoint_last.pt"]:
        whole, resumed = (saved(folder / name) for folder in trainings.values())
        assert last_loss(trainings["resumed"] / name) == last_loss(trainings["whole"] / name)
        assert_same(resumed["model"], whole["model"])


def evaluated(corpus, checkpoint, caplog, *given):
    """Tokens and perplexity by ``fairseq-eval-lm``."""
    arguments = [str(corpus.data), "--user-dir", str(PLUGIN), "--path", str(checkpoint), "--cpu"]
    arguments += [word for part in given for word in str(part).split()]
    arguments += ["--tokens-per-sample", str(SEGMENT), "--num-workers", "0", "--no-progress-bar"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        parsed = options.parse_args_and_arch(options.get_eval_lm_parser(), arguments)
        found = eval_lm.main(convert_namespace_to_omegaconf(parsed))
    (said,) = [r.getMessage() for r in caplog.records if "Evaluated" in r.getMessage()]
    return int(said.split()[1].replace(",", "")), float(found["perplexity"])


def test_the_memory_makes_evaluation_better_and_loses_no_token(trainings, corpus, caplog):
    checkpoint = trainings["whole"] / "checkpoint_last.pt"
    streams = f"{STREAMS.split(' --no')[0]} --gen-subset test --max-tokens {3 * SEGMENT}"
    tokens, remembered = evaluated(corpus, checkpoint, caplog, streams)
    assert (tokens, remembered) == evaluated(corpus, checkpoint, caplog, streams)
    blocks, forgotten = evaluated(corpus, checkpoint, caplog, "--gen-subset test")
    assert tokens == blocks == corpus.token_count("test")
    assert remembered < 0.97 * forgotten
    assert math.isfinite(remembered)
    cut = "--model-overrides {'memory_length':0}"
    unordered = evaluated(corpus, checkpoint, caplog, streams, cut)
    assert unordered == (tokens, pytest.approx(forgotten, rel=1e-5))


REFUSED = {
    "--attention-type linear --position-encoding rope": "requires softmax attention",
    "--decoder-layerdrop 0.1": "--decoder-layerdrop cannot be used with a memory",
    "--memory-length -1": "--memory-length must be at least 0 and at most 2,147,483,648, not -1",
    "--sample-break-mode complete": "supports sample_break_mode=none only",
    "--add-bos-token": "supports add_bos_token=False only",
    "--memory-length 0 --attention-type linear --position-encoding rope "
    "--reset-at-documents nowhere": "--reset-at-documents requires softmax attention",
    "--reset-at-documents nowhere --document-boundary w1": "--document-boundary, not both",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_sentence(corpus, given):
    with pytest.raises(SystemExit, match=REFUSED[given]) as refusal:
        built(corpus, given, memory=4)
    with pytest.raises(SystemExit, match="absolute positions restart in every segment"):
        build(corpus, SMALL, f"{SOFTMAX} rope --memory-length 4")
    assert refusal.value.code == 2
    assert "\n" not in str(refusal.value)


def test_a_memory_is_not_trained_without_streams(corpus):
    model, _ = built(corpus, "--task language_modeling")
    tokens = torch.randint(4, 24, (2, SEGMENT))
    model.eval()(tokens)
    with pytest.raises(SystemExit, match="train with --task lrpe_truncated_bptt_lm"):
        model.train()(tokens)
