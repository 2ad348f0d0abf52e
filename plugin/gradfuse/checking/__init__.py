"""Comparison of models by running them."""
