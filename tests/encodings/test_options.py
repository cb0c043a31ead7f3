"""Options, departures and sharing are declared by the method and reach users from there."""

import copy
import pickle
from argparse import Namespace
from dataclasses import fields

import pytest
from torch import nn

from lrpe_fairseq.encodings import (
    ENCODINGS,
    EncodingOptions,
    build_encoding,
    encoding_class,
    options_of_encodings,
)
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.encodings.fidelity import DEPARTURES, OF_ATTENTION, OF_MODELS, parse_departures
from lrpe_fairseq.encodings.layers import encoding_options
from lrpe_fairseq.errors import ChoiceError, one_sentence_errors
from lrpe_fairseq.models.options import AttentionOptions
from tests.encodings.toy import Toy


def test_a_configuration_has_every_option_with_its_default_and_help_text():
    found = {field.name: field for field in fields(AttentionOptions)}
    for name, own in options_of_encodings().items():
        assert found[name].default == own.default
        assert found[name].metadata["help"] == own.metadata["help"]


def test_a_configuration_older_than_an_option_has_its_default():
    old = Namespace(fidelity="t5-unit-init", spe_sines=3, t5_max_distance=80)
    options = encoding_options(old)
    assert options.fidelity == {"t5-unit-init"}
    assert options.of(encoding_class("spe").Options).spe_sines == 3
    assert options.of(encoding_class("t5").Options).t5_max_distance == 80
    assert options.of(encoding_class("rope").Options).lrpe_householder_start == "normal"


def test_options_can_be_copied_and_pickled():
    options = EncodingOptions(frozenset(["t5-unit-init"]), t5_max_distance=80)
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options


def test_unknown_options_and_values_are_refused():
    with pytest.raises(ChoiceError, match="no encoding has the option 't5_distance'; did you mean"):
        EncodingOptions(t5_distance=8)
    with pytest.raises(ChoiceError, match="choose one of normal, unit"):
        EncodingOptions(lrpe_householder_start="zero")


def test_departures_are_those_of_the_methods_of_attention_and_of_models():
    of_methods = [encoding_class(name).departures for name in ENCODINGS]
    others = OF_ATTENTION.keys() | OF_MODELS.keys()
    assert DEPARTURES.keys() == {d for own in of_methods for d in own} | others


def test_published_leaves_out_what_would_change_the_rows_of_other_papers():
    named = {name for name, own in DEPARTURES.items() if own.named_only}
    assert named == OF_MODELS.keys()
    assert parse_departures("published") == DEPARTURES.keys() - named
    assert parse_departures(f"{', '.join(named)}, published") == DEPARTURES.keys()
    assert parse_departures("correct") == set()


def test_any_encoding_can_share_its_parameters(monkeypatch):
    monkeypatch.setitem(ENCODINGS, "toy", Toy)
    for shared in (True, False):
        options = EncodingOptions(toy_shared=shared)
        layers = nn.ModuleList(build_encoding("toy", 4, 1, options=options) for _ in range(3))
        share_across_layers(layers)
        assert len(list(layers.parameters())) == (1 if shared else 3)
    with pytest.raises(NotImplementedError, match="no parameters to share"):
        build_encoding("none", 4, 1).share_with(build_encoding("none", 4, 1))


def test_only_a_users_choice_loses_its_traceback(capsys):
    with pytest.raises(SystemExit) as refusal, one_sentence_errors():
        raise ChoiceError("choose another")
    assert refusal.value.code == 2
    assert capsys.readouterr().err == "lrpe_fairseq: choose another\n"
    with pytest.raises(ValueError, match="a defect"), one_sentence_errors():
        raise ValueError("a defect")
