"""The model lrpe_classifier: padding, pooling, norms, pairs and pixels."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from omegaconf import OmegaConf
from torch import nn

from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.encodings import Encoding
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.experiments.data.examples import BYTES
from lrpe_fairseq.experiments.families import load_named
from lrpe_fairseq.experiments.records.files import CONFIGS, load_config
from lrpe_fairseq.models.classifier import (
    ClassifierLayer,
    LRPEClassifier,
    LRPEClassifierConfig,
    LRPEClassifierTinyConfig,
    TokenBatchNorm,
    gated_mean,
    mean_of_tokens,
)
from lrpe_fairseq.models.patches import Pixels
from tests.end_to_end.cases import sampled, usable
from tests.test_data_prep import load
from tests.trial import configurations

PAD, FIRST = 1, 4
CLASSES = 5
CONFIGURED = CONFIGS / "classification"
IMAGES = ("vit-imagenet", "cct-cifar10", "cct-cifar10-small")  # built in test_experiments
BOTH = pytest.mark.parametrize("attention", ["linear", "softmax"])


def task_of(symbols, pairs=False, longest=64):
    words = Dictionary()
    for symbol in symbols:
        words.add_symbol(symbol)
    return SimpleNamespace(
        source_dictionary=words, num_classes=CLASSES, pairs=pairs, max_positions=lambda: longest
    )


def model_of(attention="linear", encoding="rope", seed=1, **options):
    """A small model in float64 and in evaluation, with every table of its encoding filled."""
    sizes = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16, "dropout": 0.0}
    chosen = {**sizes, "attention_type": attention, "position_encoding": encoding, **options}
    config = OmegaConf.structured(LRPEClassifierTinyConfig(**chosen))
    torch.manual_seed(seed)
    task = task_of(BYTES, bool(options.get("pair_head")))
    model = LRPEClassifier.build_model(config, task).double().eval()
    for module in model.modules():
        if isinstance(module, Encoding):
            for parameter in module.parameters():
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def rows_of(*lengths, seed=0):
    """Token ids of random inputs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(FIRST, FIRST + 256, (n,), generator=generator) for n in lengths]


def batch_of(rows, longest=0):
    """The rows padded on the right, (B, T)."""
    longest = longest or max(map(len, rows))
    return torch.stack([nn.functional.pad(r, (0, longest - len(r)), value=PAD) for r in rows])


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


FEW = [("linear", "rope"), ("linear", "spe"), ("softmax", "t5"), ("softmax", "lrpe-type4")]


@pytest.mark.parametrize(("attention", "name"), sampled(usable("encoder-only"), FEW))
def test_an_example_has_one_output_alone_padded_and_anywhere_in_the_batch(attention, name):
    model, rows = model_of(attention, name), rows_of(5, 9, 3)
    with torch.no_grad():
        alone = torch.cat([model(row[None]) for row in rows])
        same(model(batch_of(rows)), alone)
        same(model(batch_of(rows[::-1], longest=12)), alone.flip(0))


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "batch"},
        {"norm": "batch", "final_norm": "after", "pooling": "first"},
        {"input": "pixels", "no_token_positional_embeddings": True},
        {"encoder_learned_pos": True, "pooling": "first"},
        {"pooling": "gate"},
        {"pooling": "gate", "final_norm": "after", "norm": "batch"},
        {"attention_normalizer": "layernorm", "encoding": "lrpe-type2"},
        {"attention_normalizer": "content", "encoding": "lrpe-type2"},
        {"attention_normalizer": "none", "encoding": "lrpe-type4"},
        {"attention_parts": ",".join(PARTS)},
    ],
    ids=str,
)
def test_it_holds_for_every_input_norm_normalizer_and_pooling(options):
    model, rows = model_of(**options), rows_of(5, 9, 3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_()
    with torch.no_grad():
        alone = torch.cat([model(row[None]) for row in rows])
        same(model(batch_of(rows)), alone)


@BOTH
def test_without_positions_the_order_of_the_tokens_does_not_matter_and_with_them_it_does(attention):
    (row,) = rows_of(9)
    mixed = row[torch.randperm(9, generator=torch.Generator().manual_seed(3))]
    nope = model_of(attention, "none", no_token_positional_embeddings=True)
    base = model_of(attention, "none")
    with torch.no_grad():
        same(nope(mixed[None]), nope(row[None]))
        assert (base(mixed[None]) - base(row[None])).abs().max() > 1e-3


def test_the_gate_weighs_real_tokens_by_a_softmax():
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    real = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0], [1, 0]], dtype=torch.bool)
    gate = torch.randn(5, 2, dtype=torch.float64)
    for row in range(2):
        count = int(real[:, row].sum())
        weights = gate[:count, row].exp() / gate[:count, row].exp().sum()
        expected = (weights[:, None] * x[:count, row]).sum(0)
        torch.testing.assert_close(gated_mean(x, real, gate)[row], expected)


def test_the_mean_is_over_real_tokens_and_exact_in_half_precision():
    x = torch.full((4096, 1, 2), 1.001).half()
    real = torch.ones(4096, 1, dtype=torch.bool)
    real[4000:] = False
    x[4000:] = 7
    assert torch.equal(mean_of_tokens(x, real), x[:1, 0])


def test_batch_norm_is_over_the_real_tokens_and_zero_at_padding():
    x, real = torch.randn(7, 3, 4).double(), torch.rand(7, 3) < 0.6
    norm, plain = TokenBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    out = norm(x, real)
    same(out[real], plain(x[real]))
    assert out[~real].count_nonzero() == 0
    same(norm.norm.running_var, plain.running_var)
    same(norm.eval()(x, None), plain.eval()(x.flatten(0, 1)).view(x.shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_and_parameters_of_batch_norm_stay_float32(dtype):
    model = model_of(norm="batch").float().to(dtype).train()
    logits = model(batch_of(rows_of(5, 9, 3)))
    assert logits.dtype == dtype
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            assert module.running_mean.dtype == module.weight.dtype == torch.float32


def test_drop_path_drops_the_branch_of_an_example_or_scales_it():
    model = model_of(drop_path=0.5).train()
    layer = next(m for m in model.modules() if isinstance(m, ClassifierLayer))
    torch.manual_seed(0)
    ones = torch.ones(3, 64, 16)
    kept = layer._branch(ones)
    assert set(kept.flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(kept, kept[:1, :, :1].expand_as(kept))
    assert torch.equal(layer.eval()._branch(ones), ones)


def test_a_pair_is_encoded_as_two_inputs_and_is_not_symmetric():
    model = model_of(pair_head=True)
    first, second = rows_of(5, 9, 3), rows_of(4, 2, 11, seed=1)
    with torch.no_grad():
        u, v = (torch.cat([model.encode(r[None]) for r in rows]) for rows in (first, second))
        logits = model(batch_of(first), None, batch_of(second))
        same(logits, model.head(torch.cat([u, v, u - v, u * v], 1)))
        swapped = model(batch_of(second), None, batch_of(first))
    assert (logits - swapped).abs().max() > 1e-3


def test_pixels_are_numbers_and_not_symbols():
    embed = Pixels(3, PAD, patch=1, columns=0, mean=0.25, std=0.5)
    tokens = torch.tensor([[FIRST, FIRST + 255, FIRST + 51]])
    numbers = torch.tensor([[-0.5], [1.5], [-0.1]])
    torch.testing.assert_close(embed(embed.cells(tokens))[0], embed.linear(numbers))


@BOTH
def test_patches_of_one_pixel_are_pixels_and_images_of_other_heights_may_be_padded(attention):
    options = {"input": "pixels", "patch": 2, "grid_width": 3, "position_grid": "axial"}
    model, rows = model_of(attention, **options), rows_of(24, 12)
    assert model.encoder.embed_positions.weights.shape[0] < 24
    with torch.no_grad():
        same(model(batch_of(rows)), torch.cat([model(row[None]) for row in rows]))


@pytest.mark.parametrize(
    "options",
    [
        {"pair_head": True},
        {"input": "pixels", "norm": "batch", "encoder_learned_pos": True},
        {"input": "pixels", "patch": 2, "grid_width": 3, "final_norm": "after"},
        {"encoding": "t5", "attention": "softmax"},
    ],
    ids=str,
)
def test_the_gradient_reaches_every_parameter(options):
    model = model_of(**options).train()
    tokens = batch_of(rows_of(12, 12))
    model(tokens, None, tokens.flip(0) if model.options.pair_head else None)[:, 0].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "options",
    [{"attention": "linear"}, {"encoding": "spe"}, {"encoding": "spe", "spe_shared": True}],
    ids=["rope", "own noise", "shared noise"],
)
def test_activation_checkpointing_changes_nothing_for_any_number_of_passes(options):
    options, found = {"attention": "softmax", "encoder_layers": 3, **options}, []
    for recomputed in (False, True):
        model = model_of(checkpoint_activations=recomputed, **options).train()
        torch.manual_seed(3)
        passes = [model(batch_of(rows_of(*lengths))) for lengths in ((5, 9, 3), (7, 7), (4, 9))]
        sum(logits.square().sum() for logits in passes).backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        same(one, other)


REFUSED = {
    "have no second inputs": {"pair_head": True},
    "--patch is an option of --input pixels and image: leave it out": {"patch": 2},
    "--patch needs --grid-width": {"patch": 2, "input": "pixels"},
    "--pixel-std must be above 0": {"pixel_std": 0.0, "input": "pixels"},
    "--drop-path must be at least 0 and less than 1": {"drop_path": 1.0},
    "--encoder-layers must be at least 1": {"encoder_layers": 0},
    "set one of them only": {"max_positions": 7},
    "would count every batch twice": {"norm": "batch", "checkpoint_activations": True},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_options_that_contradict_each_other_are_refused(sentence):
    config = OmegaConf.structured(LRPEClassifierTinyConfig(**REFUSED[sentence]))
    with pytest.raises(Refusal, match=sentence):
        LRPEClassifier.build_model(config, task_of(BYTES))


def configured(path):
    """The model's options of a configuration, and its task with the data's dictionary."""
    known = load_config(path)
    model = {key: value for key, value in known.model.items() if key != "_name"}
    kind = LRPEClassifierTinyConfig if known.model._name.endswith("tiny") else LRPEClassifierConfig
    symbols = load("listops").SYMBOLS if "listops" in path.stem else BYTES
    task = task_of(symbols, bool(model.get("pair_head")), known.task.max_positions)
    task.num_classes = known.task.num_classes
    return OmegaConf.merge(OmegaConf.structured(kind), model, {"encoder_layers": 1}), task


@pytest.mark.parametrize(
    "name", [p.stem for p in configurations(CONFIGURED) if p.stem not in IMAGES]
)
def test_every_configuration_builds_its_model_with_the_encodings_of_its_table(name):
    options, task = configured(CONFIGURED / f"{name}.yaml")
    lengths = [task.max_positions()] * 2 if options.input == "pixels" else [4, 2]
    tokens = batch_of(rows_of(*lengths)).clamp(max=len(task.source_dictionary) - 1)
    for encoding in sorted({row.encoding for row in load_named("tmlr-table4").rows}):
        options.position_encoding = encoding
        with torch.device("meta"):  # the values of no parameter are needed
            LRPEClassifier.build_model(options, task)
    model = LRPEClassifier.build_model(options, task).eval()
    given = [tokens, None, tokens, None] if task.pairs else [tokens]
    with torch.no_grad():
        assert model(*given).shape == (2, task.num_classes)
