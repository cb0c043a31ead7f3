"""Free decoding of trees: positions from the tokens so far, in fairseq's own generation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig

from lrpe_fairseq.encodings.domains import ORDERS, codes_from_arities
from lrpe_fairseq.errors import ChoiceError, Refusal
from lrpe_fairseq.experiments.data import transduction as data
from lrpe_fairseq.experiments.data.transduction import Recipe
from lrpe_fairseq.models.node_positions import NodeRule, rule_of
from lrpe_fairseq.tasks.transduction import decoded_sums
from tests.end_to_end.commands import PLUGIN, built, run_here, save

PAD, EOS = 1, 2
SIZES = (
    "--arch lrpe_transformer_tiny --encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 32 "
    "--decoder-embed-dim 32 --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --share-all-embeddings --dropout 0 "
    "--no-token-positional-embeddings"
)
TASK = f"--user-dir {PLUGIN} --task lrpe_transduction --cpu"


def everywhere(encoding: str, attention: str = "softmax") -> str:
    """Options of encoder, decoder and cross-attention."""
    return " ".join(
        f"--{part}-position-encoding {encoding} --{part}-attention-type {attention}"
        for part in ("encoder", "decoder", "cross")
    )


TREES = "--node-positions"
MODELS = {
    "ape-tree": f"{TREES} {everywhere('ape-tree')}",
    "linear": f"{TREES} {everywhere('ape-tree', 'linear')}",
    "tree-sq": f"{TREES} --tree-embedding {everywhere('none')}",
    "linear tree-sq": f"{TREES} --tree-embedding {everywhere('none', 'linear')}",
    "sequence": everywhere("rope"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data of one task in both orders, and of tree-ops."""
    found = {}
    for name in (*ORDERS, "tree-ops"):
        dest = tmp_path_factory.mktemp("data") / name
        chosen = ("tree-rotate", "tiny", name) if name in ORDERS else (name, "tiny", "depth")
        data.prepare(dest, Recipe(*chosen))
        found[name] = dest / "bin"
    return found


def model_of(folder: Path, name: str, *options: str) -> tuple[Any, Any, Any]:
    """Model in float64 with moved generators, task, and the first samples of valid as a batch."""
    model, task, _ = built(folder, TASK, SIZES, MODELS[name], *options)
    task.load_dataset("valid")
    pairs = task.dataset("valid")
    batch = pairs.collater([pairs[row] for row in range(4)])
    return model.double().eval(), task, batch


# --- the rule ----------------------------------------------------------------------------------


def words(*labels: str) -> Dictionary:
    found = Dictionary()
    for label in labels:
        found.add_symbol(label)
    return found


@pytest.mark.parametrize("task", ["tree-copy", "tree-rotate", "tree-c3"])
def test_the_tokens_give_the_stored_codes_in_both_orders(task: str) -> None:
    for order in ORDERS:
        recipe = Recipe(task, "tiny", order)
        dictionary = words(*(label for kind in data.labels(recipe) for label in kind))
        sentences = [
            ([dictionary.index(token) for token in side.tokens], list(side.codes))
            for sample in data.generate(recipe)["test"]
            for side in (sample.target,)
        ]
        assert rule_of(dictionary, sentences).order == order


def test_what_is_no_node_and_what_follows_a_tree_has_code_0() -> None:
    dictionary = words("o1", "l1", "l2")
    o, leaf = dictionary.index("o1"), dictionary.index("l1")
    for order, inner in (("breadth", [0, 1, 2, 5, 6]), ("depth", [0, 1, 3, 4, 2])):
        rule = NodeRule(dictionary, order)
        tree = [o, leaf, o, leaf, leaf] if order == "breadth" else [o, o, leaf, leaf, leaf]
        assert rule.codes([EOS, *tree, EOS]) == [0, *inner, 0]
        assert rule.codes([*tree, o, leaf, o]) == [*inner, 0, 0, 0]
    assert codes_from_arities([0, 2, 0, 0], 2, "depth") == [0, 0, 0, 0]


def test_a_prefix_deeper_than_int64_codes_ends_its_tree() -> None:
    dictionary = words("o1", "l1")
    codes = NodeRule(dictionary, "depth").codes([dictionary.index("o1")] * 80)
    assert codes[:62] == [2**depth - 1 for depth in range(62)]
    assert codes[62:] == [0] * 18


@pytest.mark.parametrize("line", ["", "o1 l1", "l1 l1", "o1 l1 l1 l1", "o1 l1 x9"])
def test_a_source_that_is_no_tree_is_refused(line: str) -> None:
    dictionary = words("o1", "l1")
    rule = NodeRule(dictionary, "breadth")
    good = torch.tensor([[PAD, *map(dictionary.index, ("o1", "l1", "l1")), EOS]])
    assert rule.positions(good).tolist() == [[0, 0, 1, 2, 0]]
    row = torch.tensor([[*map(dictionary.index, line.split()), EOS]])
    with pytest.raises(ChoiceError, match="sentence 1 of the batch is not a tree"):
        rule.positions(row)


def test_trees_whose_labels_do_not_determine_the_nodes_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model, task, _ = model_of(folders["tree-ops"], "ape-tree")
    with pytest.raises(Refusal, match="tree-ops has operators at leaves"):
        task.build_generator([model], GenerationConfig())
    scorer = GenerationConfig(score_reference=True)
    assert type(task.build_generator([model], scorer)).__name__ == "SequenceScorer"
    for name in ("source", "target"):
        dictionary = folders["depth"] / f"dict.{name}.txt"
        (tmp_path / dictionary.name).write_bytes(dictionary.read_bytes())
    languages = "--source-lang source --target-lang target"
    model, task, _ = built(tmp_path, TASK, SIZES, MODELS["ape-tree"], languages)
    with pytest.raises(Refusal, match="stored positions show the order"):
        task.build_generator([model], GenerationConfig())


# --- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("ape-tree", "breadth"),
        pytest.param("linear", "depth", marks=pytest.mark.exhaustive),
        pytest.param("tree-sq", "breadth", marks=pytest.mark.exhaustive),
        ("linear tree-sq", "depth"),
    ],
)
def test_decoding_through_beam_reorder_equals_the_whole_at_explicit_nodes(
    name: str, order: str, folders: dict[str, Path]
) -> None:
    model, task, batch = model_of(folders[order], name)
    task.build_generator([model], GenerationConfig())
    given = batch["net_input"]
    tokens, positions = given["prev_output_tokens"], given["prev_output_positions"]
    rows, state, steps = torch.arange(len(tokens)), {}, []
    with torch.no_grad():
        encoded = model.encoder.forward_torchscript(given)
        for step in range(tokens.shape[1]):
            # stock cross-attention takes an order of as many rows for one within each beam
            if chosen := {3: [2, 0, 3, 1, 1], 6: [4, 0, 2], 9: [1, 1, 0, 2]}.get(step):
                chosen = torch.tensor(chosen)
                model.decoder.reorder_incremental_state_scripting(state, chosen)
                encoded = model.encoder.reorder_encoder_out(encoded, chosen)
                rows, steps = rows[chosen], [out[chosen] for out in steps]
            prefix = tokens[rows, : step + 1]
            steps.append(model.decoder(prefix, encoded, incremental_state=state)[0])
        whole = model(**{k: v[rows] for k, v in given.items()})[0]
        unplaced = model(**{**given, "prev_output_positions": positions * 0})[0][rows]
    real = tokens[rows].ne(PAD)
    torch.testing.assert_close(torch.cat(steps, 1)[real], whole[real], rtol=1e-9, atol=1e-9)
    assert (unplaced - whole)[real].abs().max() > 1e-3


@pytest.mark.parametrize(
    "name", [(n if "ape" in n else pytest.param(n, marks=pytest.mark.exhaustive)) for n in MODELS]
)
def test_beam_search_scores_its_outputs_as_training_scores_them(
    name: str, folders: dict[str, Path]
) -> None:
    """Two outputs start with a leaf, so that all their tokens follow the end of a tree."""
    model, task, batch = model_of(folders["depth"], name)
    generator = task.build_generator([model], GenerationConfig(beam=3, max_len_b=30, min_len=20))
    first = [[task.target_dictionary.index(label)] for label in ("l1", "l2", "o1", "o2")]
    found = task.inference_step(generator, [model], batch, prefix_tokens=torch.tensor(first))
    given, rule = batch["net_input"], task.node_rule("target")
    for row, hypotheses in enumerate(found):
        for best in hypotheses:
            tokens = best["tokens"]
            before = torch.cat([tokens.new_tensor([EOS]), tokens[:-1]])
            one = {k: v[row : row + 1] for k, v in given.items() if k.startswith("src")}
            if "src_positions" in one:
                codes = rule.codes(before.tolist())
                assert row > 1 or not any(codes)
                one["prev_output_positions"] = torch.tensor([codes])
            with torch.no_grad():
                scores = model(prev_output_tokens=before[None], **one)[0].log_softmax(-1)[0]
            own = scores.gather(1, tokens[:, None]).squeeze(1)
            forced = len(tokens) - (len(tokens) > 30)
            torch.testing.assert_close(
                best["positional_scores"][:forced].double(), own[:forced], rtol=0, atol=1e-4
            )


def test_generate_and_interactive_agree_and_a_line_that_is_no_tree_is_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, path = folders["depth"], tmp_path / "model.pt"
    model, _, config = built(folder, TASK, SIZES, MODELS["ape-tree"])
    save(model, config, path)
    options = f"{TASK} {TREES} --path {path} --beam 2 --max-len-b 12 --num-workers 0"
    said = run_here("fairseq_cli.generate", folder, options, "--gen-subset valid --batch-size 16")
    lines = (folder.parent / "text" / "valid.source").read_text().splitlines()[:3]
    typed = run_here(
        "fairseq_cli.interactive", folder, options, "--buffer-size 3", given="\n".join(lines)
    )
    for number in range(3):
        hypothesis = re.compile(rf"^H-{number}\t(.*)$", re.MULTILINE)
        both = (hypothesis.search(out)[1].split("\t") for out in (said, typed))
        (score, text), (other, same) = both
        assert text == same
        assert float(score) == pytest.approx(float(other), abs=1e-5)
    counting = options.replace(TREES, "")
    with pytest.raises(Refusal, match="trained with --node-positions"):
        run_here("fairseq_cli.generate", folder, counting, "--gen-subset valid")
    with pytest.raises(Refusal) as refusal:
        run_here("fairseq_cli.interactive", folder, options, given="o1 l1\n")
    assert refusal.value.code == 2


def test_the_page_writes_the_positions_of_trees_of_ones_own(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[1] / "docs" / "running.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), found := {})
    name = "valid.source-target.target-positions"
    text = folders["depth"].parent / "text" / "valid.target"
    found["write_positions"](str(text), f"{tmp_path}/{name}", "depth")
    for kind in ("bin", "idx"):
        stored = folders["depth"] / f"{name}.{kind}"
        assert (tmp_path / stored.name).read_bytes() == stored.read_bytes()


# --- accuracy of decoding ----------------------------------------------------------------------


def test_sums_of_decoded_samples_by_hand() -> None:
    """A right output, one that is too short, one that is too long, and one with a wrong token."""
    target = torch.tensor([[4, 5, EOS, PAD]] * 4)
    outputs = [[4, 5, EOS], [4, EOS], [4, 5, 5, EOS], [5, 5, EOS]]
    found = decoded_sums([torch.tensor(o) for o in outputs], target, PAD)
    assert list(found.values()) == [4, 12, 3 + 1 + 2 + 2, 1]


@pytest.mark.parametrize("name", ["ape-tree", "sequence"])
def test_validation_decodes_the_first_samples_of_the_split(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task, _ = model_of(folders["depth"], name, "--decode-samples 2")
    pairs = task.dataset("valid")
    batch = pairs.collater([pairs[row] for row in (1, 5, 0, 7)])
    found = task._decoded(batch, model)
    assert found["_decoded_samples"] == 2
    assert found["_decoded_tokens"] == sum(len(pairs[row]["target"]) for row in (0, 1))
    right = [[{"tokens": pairs[row]["target"]}] for row in batch["id"].tolist() if row < 2]
    monkeypatch.setattr(task, "inference_step", lambda *_: right)
    found = task._decoded(batch, model)
    assert found["_decoded_exact"] == 2
    assert found["_decoded_correct"] == found["_decoded_tokens"]
    assert task._decoded(pairs.collater([pairs[9]]), model)["_decoded_samples"] == 0
