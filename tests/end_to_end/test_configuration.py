"""Options mean the same from the command line and from a YAML, and fairseq's own keep working."""

from enum import Enum
from itertools import cycle, product

import pytest
import torch
from fairseq.dataclass.initialize import hydra_init
from fairseq.models import MODEL_DATACLASS_REGISTRY, merge_with_parent
from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from lrpe_fairseq.attention.multihead import ATTENTION_TYPES, MultiheadAttention
from lrpe_fairseq.encodings import options_of_encodings
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, load_config
from lrpe_fairseq.experiments.records.tables import load_tables
from lrpe_fairseq.models import checks
from lrpe_fairseq.stock import NORMFORMER
from tests.end_to_end.cases import sampled
from tests.end_to_end.commands import (
    SMALL,
    TRAINING,
    assert_same,
    build,
    hydra,
    last_loss,
    load,
    run,
    save,
    saved,
    side_by_side,
    yaml_config,
)

pytestmark = pytest.mark.end_to_end

SOFTMAX_ROPE = "--attention-type softmax --position-encoding rope --encoding-seed 7"
MODEL = {"attention_type": "softmax", "position_encoding": "rope"}
UPDATES = 2


def test_a_yaml_trains_the_same_model_as_the_command_line(corpus, tmp_path):
    """The typed form repeats two options that the preset switches on already."""
    folders = tmp_path / "typed", tmp_path / "read"
    config = yaml_config(corpus, folders[1], MODEL)
    again = "--decoder-normalize-before --share-decoder-input-output-embed"
    model = f"--arch lrpe_lm_tiny {SOFTMAX_ROPE} {again} --save-interval-updates 1"
    train = [corpus.data, TRAINING, model, f"--max-update {UPDATES} --save-dir", folders[0]]
    side_by_side(
        lambda: run("fairseq_cli.train", *train),
        lambda: run("fairseq_cli.hydra_train", *hydra(tmp_path, config), "model.encoding_seed=7"),
    )
    for update in range(1, UPDATES + 1):
        typed, read = (folder / f"checkpoint_1_{update}.pt" for folder in folders)
        assert last_loss(typed) == last_loss(read)
        assert_same(saved(typed)["model"], saved(read)["model"])


@pytest.mark.parametrize(
    ("typed", "normalize_before", "shared"),
    [
        ("", True, True),
        ("--no-share-decoder-input-output-embed", True, False),
        ("--no-decoder-normalize-before", False, True),
    ],
)
def test_a_flag_sets_what_it_names_and_its_negation_clears_it(
    corpus, typed, normalize_before, shared
):
    model, _, config = build(corpus, SMALL, typed)
    decoder = model.decoder
    assert config.model.decoder_normalize_before is normalize_before
    assert decoder.layers[0].normalize_before is normalize_before
    assert (decoder.layer_norm is not None) is normalize_before
    assert (decoder.output_projection.weight is decoder.embed_tokens.weight) is shared


PARTS = [
    *(("lrpe_lm", ""), ("lrpe_roberta", ""), ("lrpe_classifier", ""), ("lrpe_vit", "")),
    *(("lrpe_transformer", f"{part}.") for part in ("encoder", "decoder", "cross")),
]


def other_value(option):
    """A value that an option of an encoding does not have by default."""
    if choices := option.metadata["choices"]:
        return next(choice for choice in choices if choice != option.default)
    if option.type is bool:
        return not option.default
    return option.type(7) if option.type in (float, str) else 7


def read_by_hydra(folder, model, *overrides):
    """The model that fairseq-hydra-train makes of a YAML and the words on its line."""
    OmegaConf.save({"model": model}, folder / "experiment.yaml")
    hydra_init("experiment")
    with initialize_config_dir(str(folder), version_base="1.1"):
        given = compose("experiment", list(overrides)).model
    return merge_with_parent(MODEL_DATACLASS_REGISTRY[model["_name"]](), given)


@pytest.mark.parametrize(
    ("model", "part", "on_the_line"),
    [*((*part, True) for part in PARTS), (*PARTS[0], False), (*PARTS[-1], False)],
)
def test_hydra_takes_every_option_of_every_encoding(model, part, on_the_line, tmp_path):
    chosen = {part + name: other_value(own) for name, own in options_of_encodings().items()}
    yaml = OmegaConf.create({"_name": model})
    if on_the_line:
        words = [f"model.{name}={value}" for name, value in chosen.items()]
        found = read_by_hydra(tmp_path, yaml, *words)
    else:
        for name, value in chosen.items():
            OmegaConf.update(yaml, name, value)
        found = read_by_hydra(tmp_path, yaml)
    read = {name: OmegaConf.select(found, name) for name in chosen}
    assert {name: str(v) if isinstance(v, Enum) else v for name, v in read.items()} == chosen
    assert len(chosen) > 20


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("model.fox_bais=3", "unknown model option 'fox_bais'; did you mean 'fox_bias'?"),
        ("model.fox_bias=much", "bad value of model option 'fox_bias': Value 'much' of type 'str'"),
        ("model.ape_init=random", "bad value of model option 'ape_init': Invalid value 'random', "),
        ("model.encoder.fox_bias=3", "unknown model option 'encoder'"),
        ("model.decoder_layers=six", "bad value of model option 'decoder_layers': Value 'six' of "),
    ],
)
def test_a_word_that_names_no_option_or_value_is_refused_in_one_sentence(word, sentence, tmp_path):
    with pytest.raises(Refusal) as refused:
        read_by_hydra(tmp_path, {"_name": "lrpe_lm"}, word)
    assert str(refused.value).startswith(f"lrpe_fairseq: {sentence}")
    assert "\n" not in str(refused.value)


def test_other_programs_may_have_a_schema_without_a_file():
    ConfigStore.instance().store("schema_only", {"a": 1})
    with initialize(config_path=None, version_base="1.1"):
        assert compose("schema_only").a == 1
        assert compose() == {}


def test_hydra_treats_the_models_of_fairseq_as_before(tmp_path):
    with pytest.raises(ConfigCompositionException, match="fox_bias"):
        read_by_hydra(tmp_path, {"_name": "transformer_lm"}, "model.fox_bias=3")


def leaves(config, above=""):
    for key, value in config.items():
        yield from (
            leaves(value, f"{above}{key}.") if isinstance(value, dict) else [(above + key, value)]
        )


@pytest.mark.parametrize("name", ["lm/wikitext2", "roberta/finetune-wikibook"])
def test_hydra_reads_a_configuration_over_its_bases_as_our_own_loader_does(name):
    path = CONFIGS / f"{name}.yaml"
    hydra_init(path.stem)
    with initialize_config_dir(str(path.parent), version_base="1.1"):
        found = compose(path.stem, ["optimization.clip_norm=7", "common.seed=3"])
    expected = dict(leaves(OmegaConf.to_container(load_config(path), resolve=True)))
    expected |= {"optimization.clip_norm": 7, "common.seed": 3}
    for key, value in expected.items():
        if not key.startswith("hydra."):
            assert OmegaConf.select(found, key) == value, key
    assert len(expected) > 40
    assert found.common.empty_cache_freq == 0  # a default of fairseq


ADAPTIVE = "--criterion adaptive_loss --adaptive-softmax-cutoff 8,16 --ddp-backend legacy_ddp"
ADAPTIVE_INPUT = f"{ADAPTIVE} --adaptive-input --adaptive-input-cutoff 8,16"
STOCK_OPTIONS = [
    "",
    ADAPTIVE,
    f"{ADAPTIVE_INPUT} --tie-adaptive-weights --tie-adaptive-proj",
    "--no-token-positional-embeddings",
    "--decoder-learned-pos",
    "--checkpoint-activations",
    "--decoder-layerdrop 0.5",
    "--quant-noise-pq 0.5 --quant-noise-pq-block-size 4",
    "--character-embeddings --character-filters [(1,8),(2,8)] --character-embedding-dim 4 "
    "--char-embedder-highway-layers 1",
    "--no-decoder-final-norm",
    "--layernorm-embedding --no-scale-embedding",
    "--add-bos-token",
    "--activation-fn gelu --attention-dropout 0.1 --activation-dropout 0.1",
    "--scale-fc --scale-attn --scale-heads --scale-resids",
    "--decoder-input-dim 16 --decoder-output-dim 16",
    "--label-smoothing 0.1 --criterion label_smoothed_cross_entropy",
]


def train_step(corpus, *options, seed=1):
    """A model after one backward pass, and its loss per token."""
    model, task, config = build(corpus, SMALL, *options)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    sample = dataset.collater([dataset[i] for i in range(len(dataset))])
    torch.manual_seed(seed)
    model.set_num_updates(0)
    loss, size, _ = task.build_criterion(config.criterion)(model.train(), sample)
    loss.backward()
    return model, loss.item() / size


@pytest.mark.parametrize(
    ("attention_type", "options"),
    sampled(
        list(product(ATTENTION_TYPES, STOCK_OPTIONS)),
        zip(cycle(ATTENTION_TYPES), STOCK_OPTIONS, strict=False),
    ),
)
def test_an_option_of_fairseq_trains_every_parameter(corpus, attention_type, options):
    attention = f"--attention-type {attention_type} --position-encoding lrpe-type3"
    model, loss = train_step(corpus, attention, options)
    assert 2 < loss < 20
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    if "layerdrop" in options:
        parameters = {k: p for k, p in parameters.items() if p.grad is not None}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert any(parameter.grad.any() for parameter in parameters.values())


@pytest.mark.parametrize(("option", "part"), NORMFORMER.items())
def test_an_option_of_normformer_builds_its_part_of_every_layer(corpus, option, part):
    plain = dict(build(corpus, SMALL)[0].named_parameters())
    model, _, config = build(corpus, SMALL, f"--{option.replace('_', '-')}")
    added = {name for name, _ in model.named_parameters()} - plain.keys()
    layers = range(config.model.decoder_layers)
    assert {name.split(f".{part}")[0] for name in added} == {f"decoder.layers.{n}" for n in layers}


def test_a_checkpoint_that_was_trained_without_its_options_of_normformer_is_read_without(
    corpus, tmp_path, caplog
):
    model, _, config = build(corpus, SMALL)
    config.model.scale_fc = config.model.scale_attn = True  # as older versions saved it
    read, _, _ = load(save(model, config, tmp_path / "old.pt"))
    assert read.state_dict().keys() == model.state_dict().keys()
    assert caplog.text.count("which was ignored when it was trained") == 2


WITHOUT_POSITIONS = "is defined for models without absolute positions: pass --no-token-positional-"
LONGER = "can fail on texts longer than those of training: for these pass --attention-norm"
IGNORED, UNSCALED = "is ignored: ", "ntk needs --context-factor above 1"
WARNED = {
    "alibi": {WITHOUT_POSITIONS},
    "fox --attention-type softmax": {WITHOUT_POSITIONS},
    "alibi --no-token-positional-embeddings": set(),
    "rope": {LONGER},
    "lrpe-type2": {LONGER},
    "liere": {LONGER},
    "ape": {LONGER},
    "rope --attention-normalizer content": set(),
    "rope --attention-type softmax": set(),
    "rope --attention-type softmax --attention-normalizer content": {IGNORED},
    "rope --attention-type softmax --context-scaling ntk": {UNSCALED},
    "rope --attention-type linear,softmax --attention-normalizer content": set(),
    "lrpe-type4 --attention-dropout 0.1": {IGNORED},
    "gated:rope --no-token-positional-embeddings": set(),
    "lrpe-type4": set(),
    "permuteformer": set(),
}


@pytest.mark.parametrize("options", WARNED)
def test_a_choice_that_may_disappoint_is_warned_about(corpus, caplog, options):
    checks._warn_once.cache_clear()
    build(corpus, SMALL, f"--position-encoding {options}")
    found = [r.getMessage() for r in caplog.records if r.name == checks.__name__]
    known = WITHOUT_POSITIONS, LONGER, IGNORED, UNSCALED
    said = {s for s in known if any(s in message for message in found)}
    assert said == WARNED[options]


@pytest.mark.parametrize("attention_type", ATTENTION_TYPES)
def test_checkpointed_activations_are_computed_again_and_change_no_gradient(
    corpus, attention_type, monkeypatch
):
    passes: list[MultiheadAttention] = []
    attend = MultiheadAttention.attend
    monkeypatch.setattr(
        MultiheadAttention,
        "attend",
        lambda self, *rest, **named: passes.append(self) or attend(self, *rest, **named),
    )
    attention = f"--attention-type {attention_type}"
    plain, plain_loss = train_step(corpus, attention)
    assert len(passes) == 2  # layers
    frugal, frugal_loss = train_step(corpus, attention, "--checkpoint-activations")
    assert len(passes) == 2 + 2 * 2
    assert frugal_loss == plain_loss
    grads = [{k: p.grad for k, p in one.named_parameters()} for one in (plain, frugal)]
    assert_same(*grads)


def test_layerdrop_leaves_no_noise_of_an_earlier_pass_in_shared_spe(corpus):
    spe = "--attention-type softmax --position-encoding spe --no-spe-gated --spe-shared"
    model, _, _ = build(corpus, SMALL, spe, "--decoder-layerdrop 0.5 --dropout 0")
    tokens = torch.randint(4, 24, (1, 20))
    torch.manual_seed(1)
    with torch.no_grad():
        outputs = [float(model.train()(tokens)[0].sum()) for _ in range(40)]
    assert len({x for x in outputs if outputs.count(x) > 1}) == 1  # without any layer


@pytest.mark.parametrize("table", load_tables(ROOT / "configs" / "tables"), ids=lambda t: t.name)
def test_a_row_without_encoding_is_named_by_the_absolute_positions_of_its_model(table):
    for scale, config in table.scales.items():
        model = load_config(ROOT / config).model
        built = merge_with_parent(MODEL_DATACLASS_REGISTRY[model._name](), OmegaConf.create(model))
        sides = [built.get(side) or {} for side in ("encoder", "decoder")]
        learned = any(side.get("learned_pos") for side in sides) or built.get("encoder_learned_pos")
        options = table.at(scale).options
        named = any(v for k, v in options.items() if k.endswith("learned_pos"))
        rows = [row for row in table.at(scale).rows if row.encoding == "none"]
        assert not rows or bool(learned) == named
