"""The sums of linear attention: definition, C++ and Triton."""
