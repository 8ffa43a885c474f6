"""How a net runs in training: by kernels of our own, compiled, as it is, or replayed as a graph."""
