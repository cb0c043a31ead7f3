"""The model card of an exported model: README.md in its folder."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from itertools import groupby
from typing import Any

from torch import nn

from lrpe_fairseq.hf.checkpoint import Checkpoint
from lrpe_fairseq.hf.config import LAYER, LRPEConfig

Run = Mapping[str, Any]
PAPER = """@article{qin2023linearized,
  title = {Linearized Relative Positional Encoding},
  author = {Qin, Zhen and Sun, Weixuan and Lu, Kaiyue and Deng, Hui and Li, Dongxu and
            Han, Xiaodong and Dai, Yuchao and Kong, Lingpeng and Zhong, Yiran},
  journal = {Transactions on Machine Learning Research},
  year = {2023},
  url = {https://openreview.net/forum?id=xoLyps2qWc}
}"""
CAUSAL = """```python
import lrpe_fairseq.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r})
text = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**text, max_new_tokens=100, do_sample=True, top_k=10)[0]))
```"""
MASKED = """```python
import lrpe_fairseq.hf
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForMaskedLM.from_pretrained({name!r})
text = tokenizer("The <mask> is", return_tensors="pt")
print(tokenizer.decode(model(**text).logits[0].argmax(-1)))
```"""
DISTRIBUTION = "lrpe-fairseq"
IMPORT = (
    "Instead of the first import, `trust_remote_code=True` may be passed to both `from_pretrained`."
)


def card(
    name: str, checkpoint: Checkpoint, model: nn.Module, run: Run | None, license_name: str
) -> str:
    """Return the model card.

    name: of the model. model: the exported model. run: its run file, or None for no results.
    """
    config: LRPEConfig = model.config
    usage = (CAUSAL if config.causal else MASKED).format(name=name)
    sections = [
        _front_matter(config, license_name),
        f"# {name}",
        _summary(config, model),
        f"## Use\n\n{_installation()}\n\n{usage}\n\n{IMPORT}",
        f"## Layers\n\n{_layers(config)}",
        f"## Training\n\n{_training(checkpoint)}",
        *([] if run is None else [f"## Results\n\n{_results(run)}"]),
        f"## License and citation\n\n{_citation(model, license_name)}",
    ]
    return "\n\n".join(sections) + "\n"


def _installation() -> str:
    """Return how to install this package: from its repository, or from a wheel beside the model.

    The address of the repository is that of the installed package; a build without
    ``REPOSITORY_URL`` has none.
    """
    wheel, source = "lrpe_fairseq-VERSION-py3-none-any.whl", ""
    with suppress(metadata.PackageNotFoundError):
        known = metadata.metadata(DISTRIBUTION)
        wheel = wheel.replace("VERSION", known["Version"])
        addresses = [line.split(", ", 1) for line in known.get_all("Project-URL") or ()]
        source = dict(addresses).get("Source", "")
    said = "It needs `lrpe_fairseq` with its extra `[hf]`, and no fairseq."
    if source:
        return f'{said}\n\n```\npip install "{DISTRIBUTION}[hf] @ git+{source}"\n```'
    return (
        f"{said} Download its wheel, which stands beside the model or comes from its author:\n\n"
        f'```\npip install "./{wheel}[hf]"\n```'
    )


def _front_matter(config: LRPEConfig, license_name: str) -> str:
    kinds = sorted({own["attention_type"] for own in _every(config)})
    tags = ["lrpe_fairseq", "relative-positional-encoding"]
    tags += [f"{kind}-attention" for kind in kinds]
    lines = [
        "---",
        f"license: {license_name}",
        "library_name: transformers",
        f"pipeline_tag: {'text-generation' if config.causal else 'fill-mask'}",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
    ]
    return "\n".join(lines)


def _summary(config: LRPEConfig, model: nn.Module) -> str:
    kind = "language model" if config.causal else "masked language model"
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return (
        f"A {kind} trained with lrpe_fairseq: {config.num_hidden_layers} layers of width "
        f"{config.hidden_size} with {config.num_attention_heads} heads, {config.vocab_size:,} "
        f"symbols, {millions:.3g} million parameters; absolute positions: "
        f"{config.absolute_positions}."
    )


def _every(config: LRPEConfig) -> list[dict[str, Any]]:
    return [{**LAYER, **own} for own in config.attention]


def _layers(config: LRPEConfig) -> str:
    rows = []
    for own, group in groupby(enumerate(_every(config)), key=lambda pair: pair[1]):
        numbers = [index for index, _ in group]
        which = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        rest = [f"`{name}={value}`" for name, value in own.items() if name not in LAYER]
        cells = which, own["attention_type"], f"`{own['position_encoding']}`", " ".join(rest)
        rows.append(cells)
    return _table(("layers", "attention", "encoding", "options"), rows)


def _training(checkpoint: Checkpoint) -> str:
    given = checkpoint.sections.get("optimization", {})
    rates = ", ".join(f"{rate:g}" for rate in given.get("lr") or ())
    facts = [
        f"`{checkpoint.model.get('_name')}` of fairseq's task `{checkpoint.task.get('_name')}`",
        f"{checkpoint.updates:,} updates",
        f"{checkpoint.task.get('tokens_per_sample')} tokens per sample",
        *([f"learning rate {rates}"] if rates else []),
    ]
    return "; ".join(facts) + "."


def _results(run: Run) -> str:
    found = [
        (split, protocol, name, f"{value:,.6g}")
        for split, by_protocol in run["metrics"].items()
        for protocol, metrics in by_protocol.items()
        for name, value in metrics.items()
    ]
    said = [f"`{name}`: {text}" for name, text in run["protocol"].items()]
    of = f"Data `{run['dataset']}`, scale `{run['scale']}`, seed {run['seed']}."
    table = _table(("split", "protocol", "metric", "value"), found)
    return "\n\n".join([of, table, *said])


def _citation(model: nn.Module, license_name: str) -> str:
    cards = [layer.self_attn.encoding.card for layer in model.model.layers]
    sources = dict.fromkeys(own.source for own in cards if own is not None)
    methods = "".join(f"- {source}\n" for source in sources)
    return (
        f"License of the weights: {license_name}. lrpe_fairseq has the MIT license. If you use "
        f"the model, please cite the paper of its method and lrpe_fairseq's:\n\n{methods}\n"
        f"```bibtex\n{PAPER}\n```"
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines: Iterator[tuple[str, ...]] = iter([head, tuple("---" for _ in head), *rows])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
