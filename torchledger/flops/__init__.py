"""FLOPs of ops: a rule for each op, formulas by family."""
