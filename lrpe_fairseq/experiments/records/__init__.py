"""Run files, checkpoints, fairseq's logs and table layouts: what the other rooms read and write."""
