"""Vocabulary, chat templates, detokenising."""
