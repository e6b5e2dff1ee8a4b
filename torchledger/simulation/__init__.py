"""A CUDA device that is not there: what its tensors are, what its allocator holds, and the word "cuda" itself."""
