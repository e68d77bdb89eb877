"""Architectures: the math of a model and nothing else."""
