"""Lambda P phi(x) of the LRPE family: definition, C++ and Triton."""
