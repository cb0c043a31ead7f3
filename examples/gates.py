"""Put FoX's forget gates into a pretrained model, and train it.

    python -m examples.gates MODEL TEXT FOLDER

A gate of every head and token multiplies the weights of all earlier tokens (Lin et al. 2025). With
``--bias 8`` a gate starts at 0.9997, so that the model starts near the pretrained function; 0 is
the start of FoX, which forgets all but a few tokens.
"""

from collections.abc import Sequence

from examples import common


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Convert, train and save a model; return its losses."""
    parser = common.parser("Put FoX's forget gates into a pretrained model, and train it.")
    parser.add_argument("--bias", type=float, default=8.0, help="of the gates (default: 8)")
    options = parser.parse_args(arguments)
    gates = {"position_encoding": "gated:rope", "fox_bias": options.bias}
    return common.compare(options, layers=None, changes=gates)


if __name__ == "__main__":
    main()
