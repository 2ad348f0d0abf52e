"""The numerical proof that each rewrite must pass."""
