"""Read and write run files, checkpoints, fairseq's logs and table layouts."""
