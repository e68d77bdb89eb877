"""How experts move: coordinator, lookahead, reader, uploader."""
