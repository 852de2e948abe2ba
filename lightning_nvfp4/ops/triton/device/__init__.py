"""Device code, in Triton's language."""
