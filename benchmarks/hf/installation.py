"""``python -m benchmarks.hf.installation CHECKPOINT``: minutes from a wheel to a generated text.

The package is built as a wheel. A new environment without fairseq installs it with the extra
``[hf]``, loads an exported model and continues a text. The result is
results/bench/hf-installation.json. Downloads count, so the time depends on the network.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hf import common
from lrpe_fairseq import hf
from lrpe_fairseq.experiments.records.files import ROOT, write_json

PROGRAM = "benchmarks.hf.installation"
TARGET = common.RESULTS / "hf-installation.json"
GENERATE = """
import importlib.util, json, sys
assert importlib.util.find_spec("fairseq") is None
import torch, transformers
import lrpe_fairseq.hf
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
text = tokenizer(sys.argv[2], return_tensors="pt")
torch.manual_seed(1)
tokens = model.generate(**text, max_new_tokens=30, do_sample=True, top_k=20)
versions = {"torch": torch.__version__, "transformers": transformers.__version__}
print(json.dumps({"text": tokenizer.decode(tokens[0], skip_special_tokens=True), **versions}))
"""


def timed(*command: str | Path, folder: Path) -> tuple[str, float]:
    """Run a command without this checkout on its path; return its output and the seconds."""
    begin = time.perf_counter()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout, time.perf_counter() - begin


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def steps(checkpoint: Path, prompt: str, folder: Path) -> dict[str, Any]:
    """Return the seconds of every step, the generated text and the versions."""
    hf.export(checkpoint, folder / "model")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _, build = timed(
        *pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder
    )
    wheel = next(folder.glob("*.whl"))
    _, create = timed(sys.executable, "-m", "venv", folder / "new", folder=folder)
    python = folder / "new" / "bin" / "python"
    _, install = timed(python, "-m", "pip", "install", "--quiet", f"{wheel}[hf]", folder=folder)
    said, generate = timed(python, "-c", GENERATE, folder / "model", prompt, folder=folder)
    seconds = {"build": build, "environment": create, "install": install, "generate": generate}
    return {"seconds": seconds, **json.loads(said.splitlines()[-1])}


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}")
    parser.add_argument("checkpoint", type=Path, help="of an lrpe_lm")
    parser.add_argument("--prompt", default="The war began", help="default: The war began")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lrpe-install-") as folder:
        found = steps(options.checkpoint, options.prompt, Path(folder))
    write_json(TARGET, {**common.stated(), **found})
    print(found)


if __name__ == "__main__":
    main()
