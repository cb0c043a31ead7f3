"""Make some layers of a pretrained model linear, and train it.

    python -m examples.linear_layers MODEL TEXT FOLDER --every 4

A linear layer has a state of constant size instead of keys and values of all tokens. It keeps the
pretrained projections, and has to learn to use them: the loss is higher at the start.
"""

from collections.abc import Sequence

from transformers import AutoConfig

from examples import common


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Convert, train and save a model; return its losses."""
    parser = common.parser("Make some layers of a pretrained model linear, and train it.")
    parser.add_argument("--every", type=int, default=4, help="the last of 4 layers (the default)")
    parser.add_argument("--position-encoding", default="rope", help="of these (default: rope)")
    options = parser.parse_args(arguments)
    given = {"gguf_file": options.gguf} if options.gguf else {}
    count = AutoConfig.from_pretrained(options.model, **given).num_hidden_layers
    layers = list(range(options.every - 1, count, options.every))
    linear = {
        "attention_type": "linear",
        "position_encoding": options.position_encoding,
        "normalizer": "content",
    }
    return common.compare(options, layers=layers, changes=linear)


if __name__ == "__main__":
    main()
