"""The command ``export``: its folder, the model card, loading elsewhere, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from lrpe_fairseq import hf
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.experiments.__main__ import main
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.hf import card
from lrpe_fairseq.hf.config import LRPEConfig
from tests.hf.models import data, exported, language_model, masked_model, random_words

ROOT = Path(__file__).resolve().parents[2]
FOX = {"attention_type": "linear", "position_encoding": "fox", "fox_bias": 3.0}
MIXED = {**FOX, "attention_type": "linear,softmax", "position_encoding": "fox,rope"}


def command(*arguments):
    """The status of ``experiments export``."""
    return main(["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that the command wrote, with words as tokens."""
    _, _, checkpoint = language_model(**MIXED, attention_window="0,4")
    made = tmp_path_factory.mktemp("export") / "my-model"
    assert command(checkpoint, made, "--license", "cc-by-4.0") == 0
    return made


def test_the_command_writes_a_folder_that_transformers_loads(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w1 w3").input_ids == [2, 5, 7]
    assert model.generation_config.suppress_tokens == [1]
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert write("w1 w2", max_new_tokens=3, do_sample=False)[0]["generated_text"]


def test_the_configuration_has_what_differs_from_the_defaults_of_each_layer(folder):
    own = json.loads((folder / "config.json").read_text())
    assert own["attention"] == [
        {"attention_type": "linear", "position_encoding": "fox", "fox_bias": 3.0},
        {"attention_type": "softmax", "position_encoding": "rope", "window": 4},
    ]
    assert own["vocab_size"] == 24


def test_the_model_card_says_layers_license_use_and_citation(folder):
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    known = yaml.safe_load(front)
    assert known["license"] == "cc-by-4.0"
    assert known["pipeline_tag"] == "text-generation"
    assert {"linear-attention", "softmax-attention"} <= set(known["tags"])
    assert "# my-model" in text
    assert "It needs `lrpe_fairseq` with its extra `[hf]`, and no fairseq." in text
    assert "| 0 | linear | `fox` | `fox_bias=3.0` |" in text
    assert "arxiv.org/abs/2104.09864" in text  # RoPE's paper
    assert "qin2023linearized" in text
    assert "Results" not in text


def test_the_model_card_has_the_command_that_installs_the_package(monkeypatch):
    known = Message()
    known["Version"] = "0.1.0"
    monkeypatch.setattr(card.metadata, "metadata", lambda name: known)
    assert 'pip install "./lrpe_fairseq-0.1.0-py3-none-any.whl[hf]"' in card._installation()
    known["Project-URL"] = "Source, https://example.org/lrpe"
    said = card._installation()
    assert 'pip install "lrpe-fairseq[hf] @ git+https://example.org/lrpe"' in said

    def absent(name):
        raise card.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(card.metadata, "metadata", absent)
    assert 'pip install "./lrpe_fairseq-VERSION-py3-none-any.whl[hf]"' in card._installation()


def test_the_model_card_shows_the_results_of_a_run_file(folder, tmp_path):
    _, _, checkpoint = language_model(**MIXED, attention_window="0,4")
    run = ROOT / "results" / "runs" / "quickstart" / "small-FoX-linear-seed1.json"
    assert command(checkpoint, tmp_path / "out", "--run", run) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| test | blocks | ppl | 4.09142 |" in text
    assert "Data `pydoc-char`, scale `small`, seed 1." in text


def test_the_run_file_of_an_evaluation_beside_the_checkpoint_is_found(tmp_path, capsys):
    _, _, checkpoint = language_model(**FOX)
    mine = shutil.copy(checkpoint, tmp_path / "checkpoint_best.pt")
    run = json.loads((ROOT / "results" / "runs" / "quickstart" / "base-small.json").read_text())
    given = {
        "experiment": "by-hand", "dataset": "mine", "task": "language_modeling",
        "attention_type": "linear", "position_encoding": "fox", "seed": 1, "scale": "by-hand",
        "metrics": {"test": {"blocks": {"loss": 2.0, "ppl": 4.0, "tokens": 10}}},
        "protocol": {"blocks": "Blocks."}, "config": run, "commit": "0", "versions": {},
        "hardware": {}, "wall_seconds": 1.0, "checkpoint": "of another one",
    }  # fmt: skip
    (tmp_path / "checkpoint_best.json").write_text(json.dumps(given))
    assert command(mine, tmp_path / "other") == 0
    assert "Results" not in (tmp_path / "other" / "README.md").read_text()
    del given["checkpoint"]
    (tmp_path / "checkpoint_best.json").write_text(json.dumps(given))
    assert command(mine, tmp_path / "own") == 0
    assert "| test | blocks | ppl | 4 |" in (tmp_path / "own" / "README.md").read_text()
    assert "results of the model card: " in capsys.readouterr().out


def refused(capsys, *arguments):
    """The sentence with which the command refuses its arguments."""
    assert command(*arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    return said[0]


def test_a_folder_that_is_not_empty_stays_as_it_is(folder, capsys):
    _, _, checkpoint = language_model(**FOX)
    before = (folder / "config.json").read_text()
    assert "is not empty: name a new folder" in refused(capsys, checkpoint, folder)
    assert (folder / "config.json").read_text() == before


def test_a_dictionary_that_is_not_that_of_the_training_is_refused(tmp_path, capsys):
    _, _, checkpoint = language_model(**FOX)
    (tmp_path / "dict.txt").write_text("".join(f"x{i} 1\n" for i in range(20)))
    mine = tmp_path / "checkpoint_best.pt"
    shutil.copy(checkpoint, mine)
    checkpoints.remember_dictionaries(tmp_path, data().parent)
    given = mine, tmp_path / "out", "--data", tmp_path
    assert "is not the dictionary" in refused(capsys, *given)
    assert "has no dict.txt: pass --data" in refused(
        capsys, mine, tmp_path / "out", "--data", tmp_path / "nothing"
    )
    assert not (tmp_path / "out").exists()


NOT_EXPORTED = {
    "an adaptive softmax": {"adaptive_softmax_cutoff": "8,16"},
    "a memory of earlier segments": {
        "memory_length": 8,
        "attention_type": "softmax",
        "position_encoding": "rope",
        "no_token_positional_embeddings": True,
    },
    "quantization noise": {"quant_noise_pq": 0.1, "quant_noise_pq_block_size": 4},
}


@pytest.mark.parametrize(("what", "options"), NOT_EXPORTED.items())
def test_what_transformers_cannot_represent_is_refused_in_one_sentence(
    what, options, tmp_path, capsys
):
    _, _, checkpoint = language_model(**options)
    said = refused(capsys, checkpoint, tmp_path / "out")
    assert said.endswith(f"models of Hugging Face have no place for {what}: train without")
    assert not (tmp_path / "out").exists()


def test_a_translation_model_is_refused_in_one_sentence(tmp_path, capsys):
    _, _, checkpoint = language_model(**FOX)
    state = torch.load(checkpoint, weights_only=True)
    state["cfg"]["model"]["_name"] = "lrpe_transformer_tiny"
    torch.save(state, tmp_path / "c.pt")
    said = refused(capsys, tmp_path / "c.pt", tmp_path / "out")
    assert said.endswith(
        "lrpe_transformer_tiny, which is not exported: choose one of lrpe_lm or lrpe_roberta"
    )


def test_a_diverged_or_damaged_checkpoint_is_refused(tmp_path):
    _, _, checkpoint = language_model(**FOX)
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["decoder.embed_tokens.weight"][5] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(ValueError, match="of a diverged training"):
        hf.export(tmp_path / "nan.pt", tmp_path / "out", tokenizer="none")
    (tmp_path / "cut.pt").write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ValueError, match="does not load: it is truncated"):
        hf.export(tmp_path / "cut.pt", tmp_path / "out", tokenizer="none")


def test_the_symbol_of_a_document_boundary_needs_its_dictionary(tmp_path):
    _, _, checkpoint = language_model(**FOX, document_boundary="w3")
    with pytest.raises(ChoiceError, match="document boundary 'w3' is needed: pass --data"):
        hf.export(checkpoint, tmp_path / "a", tokenizer="none")
    hf.export(checkpoint, tmp_path / "b")
    assert AutoConfig.from_pretrained(tmp_path / "b").document_boundary == 7


def test_a_masked_model_is_exported_with_its_tokenizer(tmp_path):
    _, _, checkpoint = masked_model(attention_type="linear")
    assert command(checkpoint, tmp_path / "out") == 0
    fill = pipeline("fill-mask", model=str(tmp_path / "out"))
    assert len(fill("w1 <mask> w3", top_k=2)) == 2
    assert "pipeline_tag: fill-mask" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hidden_act": "swish"}, "unknown hidden_act 'swish'; choose one of relu"),
        ({"absolute_positions": "rotary"}, "choose one of sinusoidal, learned, none"),
        ({"attention": [{}]}, "options of 1 layers, but num_hidden_layers is 6"),
        (
            {"scale_heads": True, "num_hidden_layers": 1, "attention": [{"head_dim": 5}]},
            "which are no heads of head_dim 5: leave one of the two out",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_made(given, said):
    with pytest.raises(ChoiceError, match=said):
        LRPEConfig(**given)


def test_a_wrong_option_of_attention_is_refused_when_the_model_is_built():
    config = LRPEConfig(hidden_size=32, num_hidden_layers=1, attention=[{"fox_bais": 1.0}])
    with pytest.raises(ChoiceError, match="no encoding has the option 'fox_bais'; did you mean"):
        hf.LRPEForCausalLM(config)


def test_encodings_stay_in_float32_in_a_model_of_half_precision():
    folder = exported(attention_type="linear", position_encoding="lrpe-type2").folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert dtypes.pop("model.layers.0.self_attn.encoding.core.theta") == torch.float32
    others = {dtype for name, dtype in dtypes.items() if ".encoding." not in name}
    assert others == {torch.bfloat16}
    tokens = random_words(2, 8)
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(model(tokens).logits.float(), expected, rtol=0.1, atol=0.1)


ELSEWHERE = """
import sys, torch
sys.modules["fairseq"] = None  # importing fails
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, tokens = sys.argv[1], torch.tensor([[2, 5, 7]])
remote = {"trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(folder, **remote)
assert "lrpe_fairseq.models" not in sys.modules
torch.save(model(tokens).logits, sys.argv[2])
model.save_pretrained(sys.argv[3])
print(AutoTokenizer.from_pretrained(folder, **remote)("w1 w3").input_ids)
"""


def test_a_colleague_without_fairseq_loads_the_folder_with_its_own_code(folder, tmp_path):
    """The code in the folder imports lrpe_fairseq.hf, and is kept when the model is saved."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)}
    paths = [str(folder), str(tmp_path / "logits.pt"), str(tmp_path / "again")]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *paths], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[2, 5, 7]"
    expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[2, 5, 7]])).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=0, atol=0)
    for name in ("config.json", "modeling_lrpe.py", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
