"""``experiments convert``: a model of transformers from the command line."""

import contextlib

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.families import VOCABULARY, build, difference, tokens
from lrpe_fairseq.experiments.commands import convert


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama and its tokenizer."""
    own = tmp_path_factory.mktemp("pretrained") / "llama"
    build("llama").save_pretrained(own)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(own)
    return own


def test_a_folder_is_converted_to_the_same_encoding_or_to_another(folder, tmp_path, capsys):
    gates = ["--position-encoding", "gated:rope", "--layers", "0,2", "--option", "fox_bias=1.5"]
    for name, options in {"same": [], "gates": [*gates, "--option", "parts=output-gate"]}.items():
        assert not convert.main([str(folder), str(tmp_path / name), *options])
        assert capsys.readouterr().out == f"written to {tmp_path / name}\n"
    original, same, gated = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (folder, tmp_path / "same", tmp_path / "gates")
    )
    assert difference(original, same, tokens()) < 5e-6
    assert gated.config.lrpe.keys() == {"0", "2"}
    own = gated.config.lrpe["0"]
    assert (own["position_encoding"], own["fox_bias"]) == ("gated:rope", 1.5)
    assert own["parts"] == "output-gate"
    assert AutoTokenizer.from_pretrained(tmp_path / "gates")("w5").input_ids == [5]


def test_a_folder_without_a_tokenizer_is_converted_without_one(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path / "bare")
    assert not convert.main([str(tmp_path / "bare"), str(tmp_path / "new"), "--layers", "0"])
    said = capsys.readouterr().out
    assert said == f"written to {tmp_path / 'new'}, without a tokenizer\n"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.lrpe.keys() == {"0"}


def test_a_tokenizer_that_does_not_load_leaves_no_folder(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    (tmp_path / "broken" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with contextlib.suppress(Exception):  # the error is that of the library tokenizers
        assert convert.main([str(tmp_path / "broken"), str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def test_layers_that_are_no_numbers_are_refused_by_an_example(folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        convert.main([str(folder), str(tmp_path / "new"), "--layers", "a"])
    said = capsys.readouterr().err
    assert "argument --layers: write numbers of layers, such as 0,2, not a\n" in said


def test_bad_input_is_refused_in_one_line(folder, tmp_path, capsys):
    new = str(tmp_path / "new")
    for arguments, reason in {
        (str(folder), str(tmp_path)): "exists: name a new folder",
        (str(folder), new, "--layers", "3"): "the model has layers 0 to 2",
        (str(folder), new, "--option", "fox_bia=1"): "no encoding has the option 'fox_bia'",
    }.items():
        assert convert.main(list(arguments)) == 2
        said = capsys.readouterr().err
        assert reason in said
        assert said.count("\n") == 1
        assert not (tmp_path / "new").exists()
