"""References in the texts of ``configs/tables/*.yaml``; bare numbers are refused.

A text contains no numbers, only references to them. A note or a finding also has no word that
states an order or another outcome, such as "leads" or "solves".

- ``[[Row | column]]``: our number in that cell.
- ``[[paper Row | column]]``: the published number in that cell.
- ``[[option KEY]]``: an option that all runs of the group share. ``dataset.max_tokens`` and
  ``dataset.batch_size`` are those of an update, over all processes; ``break`` is the rise of the
  loss that ``holds-to`` permits.
- ``[[option NAME at SCALE]]``: the same from the configuration of another scale.
- ``[[option NAME in COLUMN]]``: an option of the table, with the value of the column ``COLUMN``.
- ``[[Row ahead of Row; Row | column]]``: our numbers, with an order only where the runs support it.
"""

import re
from dataclasses import dataclass

REFERENCE = re.compile(r"\[\[\s*([^\]]+?)\s*\]\]")
NAMES = re.compile(  # names that contain numbers
    r"`[a-z-]+:?[a-z]+\d[\w.-]*`"  # `lrpe-type2`, `table8`
    r"|\bTypes? \d(?:(?:, | and )(?:Type )?\d)*"
    r"|\b(?:Table|Fig\.|Eq\.|Section) \d+"
    r"|\b(?:WikiText-\d+|ImageNet-1k|WMT'14|Multi30k|SST-2|F1|T5|RoPE-2D)\b"
    r"|\b(?:test|newstest)20\d\d\b|\bb?float(?:16|32)\b"
    r"|\b(?:first|second|last) half\b"  # a place, not a share
    r"|\([\w./-]+\.md\)"  # the target of a link
)
NUMBER = re.compile(
    r"\d(?:[\d.,]*\d)?|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|(?:dozen|hundred|thousand|million|billion|third|quarter)s?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|twelf|hundred|thousand|million)ths?"
    r"|twice|thrice|doubl(?:es?|ed|ing)|tripl(?:es?|ed|ing))\b",
    re.IGNORECASE,
)
CLAIM = re.compile(  # what runs showed; definitions have these words too: "higher is better"
    r"\b(?:zero|half|halves|halved|only"
    r"|ahead|behind|best|better|worst|worse|superior|inferior|faster|slower|lower|higher|above|below"
    r"|highest|lowest|fastest|slowest|larger|largest|smaller|smallest|bigger|biggest|fewer|greater"
    r"|stronger|strongest|weaker|weakest|(?:more|less|longer|shorter) than"
    r"|ranks? (?:first|second|last)|leads?|trails?|w[io]ns?|beat(?:s|en)?|outperform(?:s|ed)?"
    r"|surpass(?:es|ed)?|exceed(?:s|ed)?|gain(?:s|ed)?|los(?:es?|t)|improve[sd]?|degrade[sd]?"
    r"|help(?:s|ed)?|hurts?|solve[sd]?|fail(?:s|ed)?|breaks?|broken?|vanish(?:es|ed)?"
    r"|collapse[sd]?)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Option:
    """``[[option name]]``; without scale and column, that of the group's runs."""

    name: str
    scale: str = ""
    column: str = ""


@dataclass(frozen=True)
class Value:
    """``[[row | column]]``, ours or the published one."""

    row: str
    column: str
    published: bool = False


@dataclass(frozen=True)
class Order:
    """``[[first ahead of others | column]]``."""

    first: str
    others: tuple[str, ...]
    column: str


def parse(reference: str) -> Option | Value | Order:
    """Parse the inside of one ``[[...]]``. Raises: ValueError if it has none of the forms."""
    if found := re.fullmatch(r"option ([\w.*-]+)(?: at ([\w-]+)| in ([\w-]+))?", reference):
        return Option(found[1], found[2] or "", found[3] or "")
    left, bar, column = (part.strip() for part in reference.partition("|"))
    if not (left and bar and column):
        raise ValueError(f"[[{reference}]] is neither [[row | column]] nor [[option name]]")
    if " ahead of " in left:
        first, _, others = left.partition(" ahead of ")
        return Order(first.strip(), tuple(o.strip() for o in others.split(";")), column)
    label = left.removeprefix("paper ")
    return Value(label, column, published=label != left)


def labels(reference: Value | Order) -> list[str]:
    """Return the labels of the rows that a reference names."""
    if isinstance(reference, Order):
        return [reference.first, *reference.others]
    return [reference.row]


def references(text: str) -> list[Option | Value | Order]:
    """Return every reference of ``text``, in order."""
    return [parse(inside) for inside in REFERENCE.findall(text)]


def check_text(text: str) -> None:
    """Refuse a number that is not a reference. Raises: ValueError, which names it."""
    if bare := NUMBER.search(_prose(text)):
        raise ValueError(
            f"a text states {bare[0]} itself; refer to a cell as [[row | column]] or to an "
            f"option as [[option name]]"
        )


def check_note(text: str) -> None:
    """Do :func:`check_text`, and refuse words that state an order or another outcome.

    Raises: ValueError, which names the word.
    """
    check_text(text)
    if word := CLAIM.search(_prose(text)):
        raise ValueError(
            f"a note says '{word[0]}' itself; state an order as [[row ahead of row | column]], and "
            "what a row reaches as [[row | column]]"
        )


def _prose(text: str) -> str:
    return NAMES.sub("", REFERENCE.sub("", " ".join(text.split())))
