"""Recording: one dispatch mode, what it needs to know where an op runs, and the patches that tell it."""
