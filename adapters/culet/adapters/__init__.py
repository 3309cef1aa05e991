"""Chat bases and models."""
