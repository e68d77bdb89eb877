"""Files, headers, byte ranges."""
