"""Programs that change a pretrained model of transformers; see docs/huggingface.md."""
