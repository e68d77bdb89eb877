"""Block formats."""
