"""Vocabulary, chat templates, detokenising.

`vocab.load_tokenizer`, `chat_template.load_chat_template` and `detokenizer.Detokenizer` are the
three doors. Neither the `tokenizers` library nor Jinja2 is imported before it is needed.
"""
