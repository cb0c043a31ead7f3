"""Run the Python of README, which needs torch, numpy and this package only."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def main() -> None:
    """Run its blocks in their order, as one program."""
    names: dict[str, object] = {}
    text = README.read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, README.name, "exec"), names)


if __name__ == "__main__":
    main()
