"""The training loop of ``torchledger demo``: a small byte-level GPT on text that every Python has."""
