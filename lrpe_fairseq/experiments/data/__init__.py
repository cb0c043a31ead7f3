"""Data preparation used by data-prep/: corpora, bitext, tokenizers, GLUE. Downloads need no
fairseq."""
