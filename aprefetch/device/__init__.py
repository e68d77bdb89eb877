"""Where compute and slots live."""
