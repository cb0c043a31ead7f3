"""Kernels of encodings and attention: C++ for CPUs, Triton for CUDA, one loader."""
