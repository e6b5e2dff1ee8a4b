"""What is held against what: budgets, baselines and comparisons. Never imports torch."""
