"""The CUDA caching allocator as a pure model: no torch, no device, the same addresses and the same segments."""
