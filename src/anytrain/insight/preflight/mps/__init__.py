"""Apple's GPUs: which operations have a kernel, per version of torch, and what kernels refuse."""
