"""A model that keeps some layers of a larger one trains, is evaluated and resumes."""

import pytest
import torch

from lrpe_fairseq import patterns
from lrpe_fairseq.errors import ChoiceError, Refusal
from tests.end_to_end.commands import (
    PLUGIN,
    assert_same,
    built,
    load,
    run_here,
    saved,
    small_transformer,
)
from tests.end_to_end.every_task import data  # noqa: F401  (a fixture)

pytestmark = pytest.mark.end_to_end

TRAIN = (
    f"--user-dir {PLUGIN} --optimizer adam --lr 1e-2 --batch-size 16 --cpu --num-workers 0 "
    "--disable-validation --no-epoch-checkpoints --log-format none --save-dir"
)
NEW = "--reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler --restore-file"
LM = "--task language_modeling --tokens-per-sample 32 --arch lrpe_lm_tiny --decoder-embed-dim 16 "
LM += "--decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 16"
ROBERTA = "--task masked_lm --criterion masked_lm --tokens-per-sample 32 --arch lrpe_roberta_tiny "
ROBERTA += "--encoder-embed-dim 16 --encoder-ffn-embed-dim 16"
MODELS = {  # options, the side that is pruned, its encodings
    "lm": (LM, "decoder", "lrpe-type2"),
    "lm of patterns": (LM, "decoder", "lrpe-type2,rope,spe,none"),
    "roberta": (ROBERTA, "encoder", "rope"),
    "roberta of patterns": (ROBERTA, "encoder", "none,lrpe-type2,rope"),
}
KEPT = [1, 2]


@pytest.fixture(scope="module", params=MODELS)
def pruned(request, corpus, tmp_path_factory):
    """Options, folder and side of a pruned training of two updates; a training from scratch too."""
    given, side, names = MODELS[request.param]
    folder = tmp_path_factory.mktemp("pruned")
    given = [corpus.data, given, f"--{side}-layers 4 --position-encoding {names}", TRAIN]
    run_here("fairseq_cli.train", *given, folder / "full", "--max-update 2")
    keep = f"--{side}-layers-to-keep 1,2"
    last = folder / "full" / "checkpoint_last.pt"
    run_here("fairseq_cli.train", *given, folder / "cut", keep, "--max-update 2", NEW, last)
    run_here("fairseq_cli.train", *given, folder / "scratch", keep, "--max-update 2")
    return given, folder, side


def layers_of(model, side):
    stack = model.encoder.sentence_encoder if side == "encoder" else model.decoder
    return [layer.self_attn.encoding.name for layer in stack.layers]


def older(folder, side, given):
    """Write the checkpoint of the pruned training as earlier versions did; its path."""
    state, full = (saved(folder / name / "checkpoint_last.pt") for name in ("cut", "full"))
    model = full["cfg"]["model"]
    assert model[f"{side}_layers"] == 4
    assert model[f"{side}_layers_to_keep"] is None
    state["cfg"]["model"] = model
    path = folder / "older"
    path.mkdir(exist_ok=True)
    torch.save(state, path / "checkpoint_last.pt")
    return path / "checkpoint_last.pt"


@pytest.mark.parametrize("origin", ["cut", "scratch"])
def test_the_checkpoint_has_the_options_of_the_layers_that_were_built(pruned, origin):
    _, folder, side = pruned
    last = folder / origin / "checkpoint_last.pt"
    options = saved(last)["cfg"]["model"]
    assert options[f"{side}_layers"] == 2
    assert options[f"{side}_layers_to_keep"] is None
    model, _, _ = load(last)
    full, _, _ = load(folder / "full" / "checkpoint_last.pt")
    assert layers_of(model, side) == [layers_of(full, side)[layer] for layer in KEPT]
    assert_same(dict(model.state_dict()), {**model.state_dict(), **saved(last)["model"]})


def test_a_pruned_training_starts_from_the_layers_that_it_keeps(pruned):
    given, folder, side = pruned
    last = folder / "full" / "checkpoint_last.pt"
    keep = f"--{side}-layers-to-keep 2,1 --lr 0 --max-update 1 --save-dir"
    run_here("fairseq_cli.train", *given, folder / "still", keep, folder / "still", NEW, last)
    weights, stack = saved(last)["model"], f"{side}."
    found = saved(folder / "still" / "checkpoint_last.pt")["model"]
    for name, value in found.items():
        if name.startswith(stack) and ".layers." in name:
            before, _, rest = name.partition(".layers.")
            place, _, rest = rest.partition(".")
            name = f"{before}.layers.{KEPT[int(place)]}.{rest}"
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("again", [True, False], ids=["same options", "options as built"])
def test_a_pruned_training_resumes(pruned, again, tmp_path):
    given, folder, side = pruned
    last = folder / "cut" / "checkpoint_last.pt"
    found = saved(last)["cfg"]["model"]
    more = f"--{side}-layers-to-keep 1,2" if again else f"--{side}-layers 2 --position-encoding "
    more = more if again else more + found["position_encoding"]
    run_here("fairseq_cli.train", *given, tmp_path, more, "--max-update 3 --restore-file", last)
    state = saved(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 3
    assert state["cfg"]["model"] == found


def test_an_older_checkpoint_of_a_pruned_model_resumes_and_is_evaluated_if_it_says_its_layers(
    pruned, tmp_path
):
    given, folder, side = pruned
    last = older(folder, side, given)
    if "," in saved(last)["cfg"]["model"]["position_encoding"]:
        said = f"has 2 of 4 layers and does not say which: pass .*'{side}_layers': 2, 'position_enc"
        with pytest.raises(Refusal, match=said):
            load(last)
    else:
        assert len(layers_of(load(last)[0], side)) == 2
    more = f"--{side}-layers-to-keep 1,2 --max-update 3 --restore-file"
    run_here("fairseq_cli.train", *given, tmp_path, more, last)
    assert len(layers_of(load(tmp_path / "checkpoint_last.pt")[0], side)) == 2


def test_a_pruned_translation_model_resumes_and_is_loaded(data, tmp_path):  # noqa: F811
    given = [data("translation"), "--task translation -s en -t de", small_transformer(3, 16, 16)]
    given += ["--decoder-position-encoding rope,none,spe --cross-position-encoding none,none,spe"]
    given += [TRAIN]
    full, last = tmp_path / "full" / "checkpoint_last.pt", tmp_path / "cut" / "checkpoint_last.pt"
    run_here("fairseq_cli.train", *given, full.parent, "--max-update 1")
    keep = "--decoder-layers-to-keep 1,2"
    run_here("fairseq_cli.train", *given, last.parent, keep, "--max-update 1", NEW, full)
    run_here("fairseq_cli.train", *given, last.parent, keep, "--max-update 2")
    options = saved(last)["cfg"]["model"]
    assert options["decoder"]["layers"] == 2
    assert options["decoder"]["layers_to_keep"] is None
    model, _, _ = load(last)
    assert len(model.encoder.layers) == 3
    assert [layer.self_attn.encoding.name for layer in model.decoder.layers] == ["none", "spe"]
    assert model.decoder.layers[1].encoder_attn.encoding.name == "spe"


def test_a_layer_to_keep_that_is_not_there_is_refused(corpus):
    for listed in ("4", "1,7", "-1", "1,1", "one", "1,,2"):
        with pytest.raises(ChoiceError, match="the layers to keep are numbers from 0 to 3"):
            patterns.kept(listed, 4)
    for side, options, names in (("decoder", LM, "rope"), ("encoder", ROBERTA, "rope,none")):
        given = f"--{side}-layers 4 --position-encoding {names} --{side}-layers-to-keep 1,7"
        with pytest.raises(SystemExit, match="the layers to keep are numbers from 0 to 3") as ended:
            built(corpus.data, options, TRAIN, "x", given)
        assert "\n" not in str(ended.value)
