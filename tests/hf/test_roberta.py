"""RoBERTa of Hugging Face and of fairseq in ``lrpe_roberta``, and checkpoints from before 2020."""

import json
from argparse import Namespace

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
import transformers
from fairseq import tasks
from fairseq.data import Dictionary
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaTokenizerFast

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.experiments.commands import import_roberta
from lrpe_fairseq.experiments.data.pieces import tokenizer_of
from lrpe_fairseq.experiments.families import finetuning
from lrpe_fairseq.hf import roberta
from tests.end_to_end.commands import PLUGIN, TASK, configured, load, save, small_transformer
from tests.hf.models import data, disturb, masked_model, random_words
from tests.test_glue import prepare_glue, write_task

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
BYTES = roberta._bytes()
MERGES = [("a", "b"), ("Ġ", "ab"), ("ab", "c")]


@pytest.fixture(scope="module")
def of_hugging_face(tmp_path_factory):
    """A folder with a random model and the tokenizer of 263 pieces."""
    folder = tmp_path_factory.mktemp("roberta")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *map("".join, MERGES), *BYTES, "<mask>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    lines = ["#version: 0.2", *map(" ".join, MERGES)]
    (folder / "merges.txt").write_text("\n".join(lines))
    RobertaTokenizerFast(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=len(pieces), **SIZES)).eval()
    disturb(model)
    model.save_pretrained(folder)
    return folder, RobertaForMaskedLM.from_pretrained(folder)


@torch.no_grad()
def test_roberta_of_hugging_face_has_the_same_logits_in_lrpe_roberta(of_hugging_face, tmp_path):
    folder, model = of_hugging_face
    import_roberta.main([str(folder), str(tmp_path / "new")])
    ours, task, config = load(tmp_path / "new" / "checkpoint.pt")
    assert config.model._name == "lrpe_roberta"
    tokens = torch.randint(4, 260, (2, 20), generator=torch.Generator().manual_seed(1))
    tokens[:, 0], tokens[1, 14:] = 0, 1  # <s>, and padding
    expected = model(tokens, attention_mask=(tokens != 1).long()).logits
    found = ours(tokens)[0]
    real = tokens != 1
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-6)
    assert task.max_positions() == 64


def test_the_dictionary_names_pieces_by_their_numbers_in_gpt2s_encoder(of_hugging_face, tmp_path):
    folder, _ = of_hugging_face
    import_roberta.main([str(folder), str(tmp_path / "new")])
    lines = (tmp_path / "new" / "bin" / "dict.txt").read_text().splitlines()
    symbols = [line.split()[0] for line in lines]
    assert symbols == ["256", "257", "258", *map(str, range(256))]  # the mask is the task's
    assert BYTES[:3] == ["!", '"', "#"]  # and a space is Ġ, number 220
    assert BYTES[220] == "Ġ"


def test_an_imported_model_has_the_tokenizer_and_the_dictionary_that_its_glue_data_need(
    of_hugging_face, tmp_path
):
    folder, _ = of_hugging_face
    assert not import_roberta.main([str(folder), str(tmp_path / "new")])
    write_task(tmp_path / "from", "RTE", {"train": 4, "valid": 3})
    prepare_glue.prepare(
        "RTE", tmp_path / "glue", prepare_glue.pieces_of(tmp_path / "new"), tmp_path / "from"
    )
    finetuning.require_match(tmp_path / "new" / "checkpoint.pt", tmp_path / "glue" / "RTE")
    text = "abc ab — a\u2028b"
    numbers = " ".join(tokenizer_of(tmp_path / "new").cut([text]))
    dictionary = Dictionary.load(str(tmp_path / "glue" / "RTE" / "bin" / "input0" / "dict.txt"))
    ours = dictionary.encode_line(numbers, append_eos=False, add_if_not_exist=False)
    theirs = RobertaTokenizerFast.from_pretrained(folder)(text, add_special_tokens=False)
    assert ours.tolist() == theirs.input_ids


ROBERTA = (
    f"--user-dir {PLUGIN} --task masked_lm --tokens-per-sample 32 --optimizer adam --lr 3e-3 "
    "--criterion masked_lm --encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--encoder-attention-heads 4 --dropout 0 --attention-dropout 0"
)


def aged(state):
    """A state as fairseq wrote it before 2020: one projection of q, k and v, and older names."""
    state = dict(state)
    for name in [n for n in state if n.endswith(("q_proj.weight", "q_proj.bias"))]:
        kind = name.rpartition(".")[2]
        module = name.removesuffix(f"q_proj.{kind}")
        parts = [state.pop(f"{module}{p}_proj.{kind}") for p in "qkv"]
        if len({part.shape for part in parts}) == 1:
            state[f"{module}in_proj_{kind}"] = torch.cat(parts)
    return state


def stock_roberta(options=""):
    """A disturbed ``roberta`` of fairseq and its configuration."""
    config = configured(data(), f"{ROBERTA} --arch roberta --max-positions 32 {options}")
    torch.manual_seed(1)
    model = tasks.setup_task(config.task).build_model(config.model).eval()
    disturb(model)
    return model, config


def imported(source, folder):
    """The checkpoint that an import writes, as a model."""
    words = [str(source), str(folder), "--dictionary", str(data() / "dict.txt")]
    assert not import_roberta.main(words)
    return load(folder / "checkpoint.pt")[0]


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    ["--activation-fn relu", "--activation-fn gelu_accurate", "--untie-weights-roberta"],
)
def test_options_of_fairseqs_roberta_are_kept(options, tmp_path):
    stock, config = stock_roberta(options)
    save(stock, config, tmp_path / "model.pt")
    found = imported(tmp_path / "model.pt", tmp_path / "new")(random_words(2, 17))[0]
    torch.testing.assert_close(found, stock(random_words(2, 17))[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoder_learned_pos", False),
        ("encoder_normalize_before", True),
        ("layernorm_embedding", False),
        ("no_token_positional_embeddings", True),
    ],
)
def test_options_of_fairseqs_roberta_that_are_not_represented_are_refused(
    name, value, tmp_path, monkeypatch
):
    stock, config = stock_roberta()
    monkeypatch.setattr(config.model, name, value, raising=False)
    save(stock, config, tmp_path / "model.pt")
    with pytest.raises(ChoiceError, match=f"does not represent {name} {value} of this model"):
        roberta.of_fairseq(tmp_path / "model.pt")


def test_a_checkpoint_of_lrpe_roberta_is_no_roberta_of_fairseq():
    *_, checkpoint = masked_model()
    with pytest.raises(ChoiceError, match="is no checkpoint of fairseq's roberta"):
        roberta.of_fairseq(checkpoint)


OTHERS = ("Longformer", "RobertaPreLayerNorm", "Data2VecText", "XLMRobertaXL", "Bert", "Electra")


@pytest.mark.parametrize("kind", OTHERS)
def test_a_folder_with_another_model_is_refused(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, pad_token_id=1, **SIZES)
    config.save_pretrained(tmp_path)
    with pytest.raises(ChoiceError, match=f"has a model of type {config.model_type}: name a"):
        roberta.roberta(tmp_path)


def test_a_folder_without_weights_of_the_encoder_is_refused(tmp_path):
    config = RobertaConfig(vocab_size=30, **{**SIZES, "num_hidden_layers": 1})
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    RobertaConfig(vocab_size=30, **SIZES).save_pretrained(tmp_path)
    with pytest.raises(ChoiceError, match=r"has no weight roberta.encoder.layer.1"):
        roberta.roberta(tmp_path)


def test_a_folder_without_a_head_is_imported_with_a_warning(tmp_path):
    model = transformers.RobertaModel(RobertaConfig(vocab_size=30, **SIZES))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has no head for masked tokens: its head is random"):
        weights = roberta.roberta(tmp_path).weights
    embedding = weights[f"{roberta.ENCODER}embed_tokens.weight"]
    assert torch.equal(embedding, model.embeddings.word_embeddings.weight)


KINDS = {"Roberta": {}, "XLMRoberta": {}, "Camembert": {}}
KINDS |= {"Roberta, untied": {"tie_word_embeddings": False}}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_roberta_has_the_same_logits_in_lrpe_roberta(kind, tmp_path):
    name, size = kind.partition(",")[0], len((data() / "dict.txt").read_text().splitlines()) + 5
    config = getattr(transformers, f"{name}Config")(vocab_size=size, **SIZES, **KINDS[kind])
    model = getattr(transformers, f"{name}ForMaskedLM")(config).eval()
    disturb(model)
    model.save_pretrained(tmp_path / "old")
    found = imported(tmp_path / "old", tmp_path / "new")(random_words(2, 17))[0]
    torch.testing.assert_close(found, model(random_words(2, 17)).logits, rtol=0, atol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("age", ["present", "of 2019"])
def test_roberta_of_fairseq_has_the_same_logits_in_lrpe_roberta(age, tmp_path):
    stock, config = stock_roberta()
    expected = stock(random_words(2, 17))[0]
    state = stock.state_dict()
    if age == "of 2019":
        state = {
            n.replace("encoder.", "decoder.", 1).replace("layernorm_embedding", "emb_layer_norm"): t
            for n, t in aged(state).items()
        }
        own = Namespace(encoder_attention_heads=4, arch="roberta_base")
        torch.save(
            {"args": own, "model": state},
            tmp_path / "model.pt",
            _use_new_zipfile_serialization=False,
        )
    else:
        save(stock, config, tmp_path / "model.pt")
    ours = imported(tmp_path / "model.pt", tmp_path / "new")
    torch.testing.assert_close(ours(random_words(2, 17))[0], expected, rtol=0, atol=2e-6)


@torch.no_grad()
def test_a_model_that_is_imported_stays_as_it_was(of_hugging_face):
    model, tokens = of_hugging_face[1], random_words(2, 9)
    before = model(tokens).logits
    first, second = (roberta.of_hugging_face(model).weights for _ in range(2))
    assert torch.equal(model(tokens).logits, before)
    assert all(torch.equal(first[name], second[name]) for name in first)


LM = f"{TASK} --optimizer adam --lr 3e-3 --decoder-layers 2 --decoder-embed-dim 32"
ARCHS = {
    "lrpe_lm_tiny": f"{LM} --arch lrpe_lm_tiny --decoder-input-dim 32 --decoder-output-dim 32",
    "lrpe_roberta_tiny": f"{ROBERTA} --arch lrpe_roberta_tiny",
}


@torch.no_grad()
@pytest.mark.parametrize("attention", ["--attention-type softmax", "--attention-type linear"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_checkpoint_from_before_2020_loads_in_every_arch(arch, attention):
    config = configured(data(), f"{ARCHS[arch]} {attention} --position-encoding rope")
    torch.manual_seed(1)
    model, other = (tasks.setup_task(config.task).build_model(config.model) for _ in range(2))
    state = aged(model.state_dict())
    assert any("in_proj_weight" in name for name in state)
    assert not any("q_proj" in name for name in state)
    other.load_state_dict(state, strict=True, model_cfg=config.model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@torch.no_grad()
def test_a_translation_checkpoint_from_before_2020_loads_with_its_cross_attention(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for side in ("de", "en"):
        (folder / f"dict.{side}.txt").write_text((data() / "dict.txt").read_text())
    config = configured(
        folder,
        f"--user-dir {PLUGIN} --task translation -s de -t en --optimizer adam --lr 3e-3",
        f"{small_transformer()} --cross-position-encoding rope",
    )
    model, other = (tasks.setup_task(config.task).build_model(config.model) for _ in range(2))
    state = aged(model.state_dict())
    assert any("encoder_attn.in_proj_weight" in name for name in state)
    other.load_state_dict(state, strict=True, model_cfg=config.model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


REFUSED = {
    "the activation relu": {"hidden_act": "relu"},
    "layer_norm_eps 1e-12": {"layer_norm_eps": 1e-12},
    "2 types of tokens": {"type_vocab_size": 2},
    "pad_token_id 0": {"pad_token_id": 0},
    "is_decoder": {"is_decoder": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_lrpe_roberta_does_not_represent_is_refused(reason):
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=30, **{**SIZES, **REFUSED[reason]}))
    with pytest.raises(ChoiceError, match=reason):
        roberta.of_hugging_face(model)


def test_what_cannot_be_imported_is_refused_in_one_line(tmp_path, capsys, of_hugging_face):
    folder, _ = of_hugging_face
    (tmp_path / "dict.txt").write_text("a 1\n")
    torch.save({"model": {}}, tmp_path / "empty.pt")
    for arguments, reason in {
        (str(folder), str(tmp_path)): "exists: name a new folder",
        (str(tmp_path / "absent.pt"), "new"): "does not exist",
        (str(tmp_path / "empty.pt"), "new"): "is no checkpoint of fairseq's roberta",
        (
            str(folder),
            "new",
            "--dictionary",
            str(tmp_path / "dict.txt"),
        ): "has 264 symbols, and its",
        (str(folder), "new", "--dictionary", str(tmp_path / "none.txt")): "none.txt does not exist",
    }.items():
        assert import_roberta.main(list(arguments)) == 2
        said = capsys.readouterr().err
        assert reason in said
        assert said.count("\n") == 1
