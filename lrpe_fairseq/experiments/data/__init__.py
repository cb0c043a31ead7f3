"""Corpora, bitext, pieces and GLUE: what data-prep/ calls. No fairseq is needed to download."""
