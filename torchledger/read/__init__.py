"""Reading: a journal in, statements out. Pure functions, no torch."""
