"""An option under the name that it has elsewhere is refused with the right one."""

import argparse

import pytest
import torch
from fairseq import options

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.projected import OTHER_NAMES
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.errors import ChoiceError, Refusal
from lrpe_fairseq.models import bad_options
from lrpe_fairseq.models.options import AttentionOptions
from tests.end_to_end.commands import PLUGIN

KIND = {"attention_type": "linear", "position_encoding": "rope"}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_attention_names_its_argument_for_an_option_of_the_command_line(name):
    said = f"'{name}' is called '{OTHER_NAMES[name]}' in Python: give it by this name"
    for attention, more in ((MultiheadAttention, {"causal": True}), (CrossAttention, {})):
        with pytest.raises(ChoiceError) as refused:
            attention(16, 2, **KIND, **more, **{name: 1})
        assert str(refused.value) == said


def test_every_other_name_is_an_option_of_models_and_an_argument_of_attention():
    of_models = set(AttentionOptions.__dataclass_fields__)
    of_fairseq = {"attention_dropout", "attention_heads"}
    assert OTHER_NAMES.keys() - of_fairseq <= of_models
    keywords = {**KIND, "causal": True, "normalizer": "content", "window": 3, "parts": "qk-norm"}
    MultiheadAttention(16, 2, **keywords, seed=1, num_kv_heads=1, dropout=0.0)


def parsed(*words):
    parser = options.get_training_parser()
    line = ["x", "--user-dir", str(PLUGIN), "--task", "language_modeling", "--arch", "lrpe_lm_tiny"]
    return options.parse_args_and_arch(parser, [*line, *words])


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--normalizer", "--attention-normalizer"),
        ("--num-kv-heads", "--kv-heads"),
        ("--encoding", "--position-encoding"),
        ("--attention-normaliser", "--attention-normalizer"),
        ("--fox-bais=3", "--fox-bias"),
    ],
)
def test_an_unknown_option_of_fairseqs_commands_is_one_sentence_with_the_nearest_one(
    flag, meant, capsys
):
    with pytest.raises(Refusal):
        parsed(flag, "content")
    said = capsys.readouterr().err
    assert said == f"lrpe_fairseq: unknown option {flag}; did you mean {meant!r}?\n"


def test_other_errors_of_a_parser_are_its_own(capsys):
    with pytest.raises(SystemExit):
        parsed("--max-update", "many")
    assert "argument --max-update: invalid int value: 'many'" in capsys.readouterr().err


def test_a_parser_without_near_options_says_that_one_is_unknown(capsys):
    with pytest.raises(Refusal):
        bad_options._parse_or_explain(
            lambda parser: parser.parse_args(["--zzz"]), argparse.ArgumentParser()
        )
    assert capsys.readouterr().err == "lrpe_fairseq: unknown option --zzz\n"


def test_an_encoding_takes_its_options_by_keyword_or_as_one_value():
    q = torch.randn(1, 2, 4, 8)
    place = torch.arange(4)
    by_keyword = build_encoding("rope", 8, 2, rotation_base=100.0)
    as_value = build_encoding("rope", 8, 2, options=EncodingOptions(rotation_base=100.0))
    usual = build_encoding("rope", 8, 2)
    first, second, other = (e(q, q, place, place)[0] for e in (by_keyword, as_value, usual))
    assert torch.equal(first, second)
    assert (first - other).abs().max() > 1e-3
    with pytest.raises(ChoiceError, match="no encoding has the option 'fox_bais'; did you mean"):
        build_encoding("rope", 8, 2, fox_bais=1.0)
    with pytest.raises(ValueError, match="by keyword or as options, not both"):
        build_encoding("rope", 8, 2, options=EncodingOptions(), rotation_base=100.0)
