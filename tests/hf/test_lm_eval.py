"""The evaluation harness (lm-eval) reads an exported model."""

import json
import math

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")
pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrpe_fairseq import hf
from tests.hf.models import language_model

pytestmark = pytest.mark.exhaustive
LINES = ["w1 w2 w3", "w4 w6 w8 w10", "w0 w1"]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: text
doc_to_choice: ["w1", "w2"]
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}]
""",
    "writing": """
output_type: generate_until
doc_to_text: text
doc_to_target: text
generation_kwargs: {until: ["w3"], max_gen_toks: 3, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """An exported model, and what lm-eval measures of it with tasks of its own."""
    folder = tmp_path_factory.mktemp("harness")
    _, _, checkpoint = language_model(attention_type="linear", position_encoding="fox")
    hf.export(checkpoint, folder / "model")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    usual = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {text}}}}}\n"
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{usual}test_split: test{task}")
    given = {"pretrained": str(folder / "model"), "trust_remote_code": True, "device": "cpu"}
    tasks = TaskManager(include_path=str(folder))
    results = simple_evaluate(
        model="hf",
        model_args={**given, "add_bos_token": False},
        tasks=list(TASKS),
        task_manager=tasks,
        batch_size=2,
        bootstrap_iters=0,
    )
    return folder / "model", results["results"]


def test_every_kind_of_task_has_a_result(found):
    _, results = found
    assert results.keys() == TASKS.keys()
    assert 0 <= results["choice"]["acc,none"] <= 1
    assert 0 <= results["writing"]["exact_match,none"] <= 1


@torch.no_grad()
def test_the_perplexity_is_that_of_the_model(found):
    folder, results = found
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    total = 0.0
    for line in LINES:
        tokens = tokenizer(line, return_tensors="pt").input_ids  # </s> and the words
        logs = model(tokens).logits.log_softmax(-1)[0, :-1]
        total += logs.gather(1, tokens[0, 1:, None]).sum().item()
    words = sum(len(line.split()) for line in LINES)
    expected = math.exp(-total / words)
    assert results["perplexity"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-4)
