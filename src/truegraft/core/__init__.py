"""Policy: which request computes which tokens in which step. Imports no torch."""
