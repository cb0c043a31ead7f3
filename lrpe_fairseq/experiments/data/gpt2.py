"""Download the byte-level BPE of GPT-2, the tokenizer of RoBERTa."""

from collections.abc import Mapping
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import GPT2, GPT2_FOLDER

MIRRORS = (
    "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/",
)
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def obtain_gpt2(dest: Path, from_dir: Path | None, sha256: Mapping[str, str] = SHA256) -> GPT2:
    """Return the verified tokenizer, whose files are written to the data folder ``dest``.

    Raises: UserError if a file is missing, truncated or another version.
    """
    folder = dest / GPT2_FOLDER
    for file, checksum in sha256.items():
        prep.obtain(file, [mirror + file for mirror in MIRRORS], checksum, folder, from_dir)
    return GPT2(folder)
