"""I/O backends behind the reader."""
