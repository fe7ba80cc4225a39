"""CUDA kernels of our own, and how they are compiled and launched."""
