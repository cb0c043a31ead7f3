"""``python -m benchmarks.hf.harness TEXT CHECKPOINT``: what lm-eval measures of our models.

An exported language model, and SmolLM2-135M before and after its conversion to the same encoding,
whose results must be equal. Tasks need no network: paragraphs of TEXT (``lines``), and RULER's
generated tasks ``niah_single_1`` and ``niah_multikey_2`` for SmolLM2. It needs lm-eval, wonderwords
and nltk. The result is results/bench/hf-harness.json.
"""

import argparse
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers.utils import logging

from benchmarks.hf import common
from lrpe_fairseq import hf
from lrpe_fairseq.experiments.records.files import write_json

PROGRAM = "benchmarks.hf.harness"
TARGET = common.RESULTS / "hf-harness.json"
RULER = ("niah_single_1", "niah_multikey_2")
LINES = """
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: line
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
BEFORE, AFTER = "SmolLM2-135M", "SmolLM2-135M, converted"


def measured(
    folder: Path, tasks: Path, names: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Return every metric of the tasks ``names`` for the model in a folder, and the seconds."""
    begin = time.perf_counter()
    given = {"pretrained": str(folder), "trust_remote_code": True, "device": "cpu"}
    found = simple_evaluate(
        model="hf",
        model_args={**given, "max_length": 2 * options.length, "dtype": "float32"},
        tasks=names,
        task_manager=TaskManager(
            include_path=str(tasks),
            metadata={"max_seq_lengths": [options.length], "pretrained": str(folder)},
        ),
        limit=options.limit,
        batch_size=1,
        bootstrap_iters=0,
    )
    values = {
        f"{task} {metric.removesuffix(',none')}": value
        for task, row in found["results"].items()
        for metric, value in row.items()
        if isinstance(value, float) and "stderr" not in metric and value != -1
    }
    return {"metrics": values, "seconds": time.perf_counter() - begin}


def write_tasks(folder: Path, text: str, limit: int) -> None:
    """Write the task ``lines``: the first paragraphs of a text that have 200 letters or more."""
    paragraphs = [line for line in text.split("\n") if 200 <= len(line) <= 1000][:limit]
    file = folder / "lines.jsonl"
    file.write_text("".join(json.dumps({"line": line}) + "\n" for line in paragraphs))
    (folder / "lines.yaml").write_text(LINES.format(file=file))


def main(arguments: list[str] | None = None) -> None:
    """Measure the three models and write the file."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    parser.add_argument("text", type=Path, help="a text")
    parser.add_argument("checkpoint", type=Path, help="of an lrpe_lm")
    parser.add_argument("--limit", type=int, default=20, help="examples of a task (default: 20)")
    parser.add_argument("--length", type=int, default=512, help="tokens of RULER (default: 512)")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    text, facts = common.text_of(options.text)
    with tempfile.TemporaryDirectory(prefix="lrpe-harness-") as name:
        folder = Path(name)
        write_tasks(folder, text, options.limit)
        hf.export(options.checkpoint, folder / "exported")
        rows = {"exported": measured(folder / "exported", folder, ["lines"], options)}
        model, tokenizer = common.smollm2(PROGRAM)
        for row in (BEFORE, AFTER):
            if row == AFTER:
                hf.convert(model)
            own = folder / row.partition(", ")[2]
            model.save_pretrained(own / "model")
            tokenizer.save_pretrained(own / "model")
            rows[row] = measured(own / "model", folder, ["lines", *RULER], options)
            print(row, rows[row], flush=True)
    settings = {"text": facts, "limit": options.limit, "length": options.length}
    found = common.stated()
    found["versions"]["lm_eval"] = importlib.metadata.version("lm_eval")
    write_json(TARGET, {**found, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
