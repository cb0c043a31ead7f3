"""The programs of examples/, with a tiny model."""

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.families import VOCABULARY, build
from examples import gates, linear_layers


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments: the folders of a tiny Llama, a text of 640 tokens."""
    own = tmp_path_factory.mktemp("examples")
    build("llama").save_pretrained(own / "llama")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(own / "llama")
    (own / "text").write_text(" ".join(f"w{3 + i % 7}" for i in range(640)))
    return [str(own / "llama"), str(own / "text")]


def test_gates_start_near_the_pretrained_model_and_are_trained_and_resumed(given, tmp_path):
    options = [*given, str(tmp_path), "--tokens", "32", "--lr", "3e-3"]
    found = gates.main([*options, "--updates", "10"])
    assert abs(found["converted"] - found["pretrained"]) < 0.01
    assert found["trained"] < found["converted"]
    again = gates.main([*options, "--updates", "20"])
    assert again["trained"] < found["trained"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {own["position_encoding"] for own in saved.config.lrpe.values()} == {"gated:rope"}


def test_some_layers_are_linear(given, tmp_path):
    options = [*given, str(tmp_path), "--tokens", "32", "--lr", "3e-3", "--updates", "4"]
    found = linear_layers.main([*options, "--every", "2"])
    assert found["trained"] < found["converted"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {i: own["attention_type"] for i, own in saved.config.lrpe.items()} == {"1": "linear"}
