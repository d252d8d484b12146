"""Entry points: one module per command of `dspark`, each runnable as `python -m jobs.<command>`."""
