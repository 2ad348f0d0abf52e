"""Training steps and the session that runs them; none of it needs PyTorch."""
