"""Options that nothing reads: refused where they are given; a checkpoint that holds one loads."""

import logging
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from lrpe_fairseq.encodings import options_of_encodings
from lrpe_fairseq.errors import ChoiceError, Refusal
from lrpe_fairseq.experiments.families import family_of
from lrpe_fairseq.experiments.families.translation import EncoderDecoderRun
from lrpe_fairseq.experiments.records import keys
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT
from lrpe_fairseq.experiments.records.tables import load_tables
from lrpe_fairseq.models import checks
from lrpe_fairseq.models.checks import STOCK, unread_options
from lrpe_fairseq.models.resumption import check_resumed
from lrpe_fairseq.models.translation import CrossOptions, LRPETransformerConfig, check_cross_options
from lrpe_fairseq.patterns import check_length
from tests.end_to_end.commands import SMALL, build, built, load, save
from tests.end_to_end.test_fairseq_features import PAIRS

OWN = options_of_encodings()
OTHER = {  # of the options of attention that no encoding has
    "attention_normalizer": "layernorm",
    "encoding_seed": 3,
    "fidelity": "published",
    "grid_width": 4,
    "grid_height": 2,
    "position_grid": "axial",
}


def another_value(own):
    """A value that an option does not have by default."""
    if own.name in OTHER:
        return OTHER[own.name]
    if choices := OWN[own.name].metadata["choices"]:
        return next(choice for choice in choices if choice != own.default)
    return not own.default if own.type is bool else 7


OF_CROSS = [own for own in fields(CrossOptions) if own.name not in {*STOCK, "_name"}]


@pytest.mark.parametrize("own", OF_CROSS, ids=lambda own: own.name)
def test_an_option_of_stock_cross_attention_is_refused_where_it_is_given(own):
    def config(**cross):
        plain = OmegaConf.structured(LRPETransformerConfig())
        return OmegaConf.merge(plain, {"cross": cross})

    check_cross_options(config())
    given = {own.name: another_value(own)}
    flag = f"--cross-{own.name.replace('_', '-')}"
    with pytest.raises(ChoiceError, match=f"{flag} .* would be ignored by fairseq's own"):
        check_cross_options(config(**given))
    check_cross_options(config(position_encoding="rope", **given))
    check_cross_options(config(attention_type="linear", **given))


def test_the_command_line_refuses_an_option_of_stock_cross_attention(pairs):
    with pytest.raises(Refusal, match=r"--cross-fox-bias 3\.0 would be ignored"):
        built(pairs, PAIRS, "--cross-fox-bias 3")


INERT = {  # options of a model, and what a checkpoint says that nothing reads
    "a value that is no number, of a gate that is not built": ({}, {"fox_bias": float("nan")}),
    "a table that is not built": ({}, {"shaw_distance": 10**12, "cope_positions": 0}),
    "a length without a scaling": ({"position_encoding": "rope"}, {"context_length": 9}),
    "a seed that no generator takes": ({"position_encoding": "rope"}, {"encoding_seed": 10**17}),
    "a pattern longer than the stack": (
        {"position_encoding": "rope,lrpe-type2"},
        {"position_encoding": "rope,lrpe-type2,rope,fox,rope"},
    ),
}


@pytest.mark.parametrize(("model", "inert"), INERT.values(), ids=INERT)
def test_a_checkpoint_that_holds_what_nothing_reads_loads_with_a_warning(
    corpus, tmp_path, caplog, model, inert
):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in model.items()]
    trained, _, config = build(corpus, SMALL, *words)
    for name, value in inert.items():
        config.model[name] = value
    save(trained, config, tmp_path / "old.pt")
    with caplog.at_level(logging.WARNING):
        read, _, _ = load(tmp_path / "old.pt")
    for name in inert:
        assert f"the checkpoint says {name}=" in caplog.text
    assert "which nothing reads: it is read as" in caplog.text
    tokens = torch.randint(4, 20, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(read(tokens)[0], trained.eval()(tokens)[0])


def test_a_checkpoint_with_options_of_stock_cross_attention_loads_with_a_warning(
    pairs, tmp_path, caplog
):
    trained, _, config = built(pairs, PAIRS)
    inert = {own.name: another_value(own) for own in OF_CROSS}
    for name, value in inert.items():
        config.model.cross[name] = value
    save(trained, config, tmp_path / "old.pt")
    with caplog.at_level(logging.WARNING):
        read, _, _ = load(tmp_path / "old.pt")
    for name in inert:
        assert f"the checkpoint says cross.{name}=" in caplog.text
    assert all(map(torch.equal, read.state_dict().values(), trained.state_dict().values()))


def test_an_impossible_value_that_is_read_is_refused_in_a_checkpoint_too(corpus, tmp_path, capsys):
    trained, _, config = build(corpus, SMALL, "--position-encoding fox")
    config.model.fox_bias = float("nan")
    save(trained, config, tmp_path / "old.pt")
    with pytest.raises(SystemExit):
        load(tmp_path / "old.pt")
    assert "--fox-bias must be a finite number, not nan" in capsys.readouterr().err


def test_a_training_goes_on_without_the_options_that_nothing_reads():
    def config(**model):
        usual = {"attention_type": "linear", "position_encoding": "rope"}
        cross = {"attention_type": "softmax", "position_encoding": "none"}
        given = {"encoder": usual, "decoder": usual, "cross": cross}
        sections = {n: {**given[n], **model.get(n, {})} for n in given}
        return {"model": {"_name": "lrpe_transformer", **sections}, "task": {}}

    had = config(encoder={"fox_bias": 3.0}, cross={"encoding_seed": 3, "fidelity": "published"})
    check_resumed("old.pt", had, config(encoder={"fox_bias": 0.0}, cross={"encoding_seed": 0}))
    with pytest.raises(Refusal, match=r"encoder\.rotation_base=0\.0; .* encoder\.rotation_base=9"):
        check_resumed(
            "old.pt", config(encoder={"rotation_base": 0.0}), config(encoder={"rotation_base": 9.0})
        )
    linear = {"attention_type": "linear", "encoding_seed": 0}
    # both names: of fairseq-train and of fairseq-hydra-train
    both = r"--save-dir \(checkpoint\.save_dir\), .* --finetune-from-model \(checkpoint\.finetune"
    with pytest.raises(Refusal, match=rf"cross\.encoding_seed.* {both}"):
        check_resumed("old.pt", config(cross=linear), config(cross={**linear, "encoding_seed": 1}))


def test_an_option_of_a_method_that_no_layer_has_is_named_once(corpus, caplog):
    checks._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            build(corpus, SMALL, "--position-encoding rope,alibi --t5-max-distance 9")
    assert caplog.text.count("t5_max_distance=9 is ignored: no layer has a position encoding") == 1
    options = SimpleNamespace(position_encoding="rope,fox", fox_bias=3.0, ape_init="identity")
    assert unread_options(options) == {"ape_init": "identity"}


@pytest.mark.parametrize(
    ("pattern", "layers", "fits"),
    [
        ("a", 1, True),
        ("a,b", 2, True),
        ("a,b", 5, True),
        ("a,b", 1, False),
        ("a,b,c,d,e", 2, False),
    ],
)
def test_a_pattern_has_no_more_values_than_the_stack_has_layers(pattern, layers, fits):
    if fits:
        check_length("attention_type", pattern, layers)
        return
    with pytest.raises(ChoiceError, match=f"--attention-type {pattern} has .* values for a stack"):
        check_length("attention_type", pattern, layers)


def test_five_values_over_two_layers_are_refused_by_the_name_of_the_option(corpus, pairs):
    five = "linear,softmax,linear,softmax,linear"
    with pytest.raises(Refusal, match=f"--attention-type {five} has 5 values for a stack of 2 lay"):
        build(corpus, SMALL, f"--attention-type {five}")
    for side in ("encoder", "decoder", "cross"):
        with pytest.raises(Refusal, match=f"--{side}-attention-type {five} has 5 values"):
            built(pairs, PAIRS, f"--{side}-attention-type {five}")


TABLES = [
    table
    for table in load_tables(CONFIGS / "tables")
    if any(
        issubclass(family_of(ROOT / config), EncoderDecoderRun) for config in table.scales.values()
    )
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_no_table_trains_with_options_that_stock_cross_attention_refuses(table):
    """A row whose cross-attention is encoded has the decoder's options of that encoding."""
    found = 0
    for scale, config in table.scales.items():
        family = family_of(ROOT / config)
        for cell in keys.cells(table.at(scale)):
            for run in family.of_cell(table, cell, scale, ROOT / config, 1):
                chosen = OmegaConf.to_container(run.settings().model, resolve=True)
                own = {side: chosen.get(side) or {} for side in ("decoder", "cross")}
                stock = OmegaConf.structured(LRPETransformerConfig())
                check_cross_options(OmegaConf.merge(stock, {"cross": own["cross"]}))
                if own["cross"].get("position_encoding") == "shaw":
                    assert own["cross"]["shaw_distance"] == own["decoder"]["shaw_distance"]
                found += 1
    assert found


def test_an_option_that_a_layer_refuses_is_not_also_called_ignored(corpus, caplog):
    checks._warn_once.cache_clear()
    with pytest.raises(Refusal, match="'alibi' does not support --angle-floor: leave it out"):
        build(corpus, SMALL, "--position-encoding alibi --angle-floor turn")
    assert "is ignored" not in caplog.text
