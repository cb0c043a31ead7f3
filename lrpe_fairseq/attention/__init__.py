"""Linear and softmax attention. Pure PyTorch; fairseq is not needed."""
