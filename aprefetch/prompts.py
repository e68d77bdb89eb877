"""From a prompt, in any of its forms, to token ids that the model may be given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aprefetch.errors import ContextLengthError, InvalidRequestError
from aprefetch.text.chat_template import ChatTemplate
from aprefetch.text.tokenizer import Tokenizer

__all__ = ["Encoded", "Prompt", "PromptEncoder"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text to continue, token ids taken as they are, or chat messages."""

_SHORT_TEXT = 4096  # characters; longer prompts are encoded on a thread


class Encoded(NamedTuple):
    """Token ids, the text they came from, and the origin of the template, if there was one."""

    ids: list[int]
    text: str | None
    template: str | None


class PromptEncoder:
    """Encodes prompts for one model.

    `n_vocab` is the length of a row of its logits. Text that cannot fit into `context_tokens`,
    however long its tokens are, is refused before it is encoded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        n_vocab: int,
        context_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._n_vocab = n_vocab
        self._context_tokens = context_tokens
        self._longest_token = 0  # bytes; found when first needed

    async def encode(
        self,
        prompt: Prompt,
        chat_options: Mapping[str, Any] | None = None,
        *,
        for_answer: bool = True,
    ) -> Encoded:
        """At least one id, each inside the vocabulary.

        Args:
            chat_options: variables of the chat template; for chat messages only.
            for_answer: text is to be continued, so never gets an end-of-text token appended.

        Raises:
            InvalidRequestError: not a prompt, an empty one, or ids outside the vocabulary.
            ContextLengthError: far more text than the context holds.
        """
        text, template = None, None
        if isinstance(prompt, str):
            text = prompt
        elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InvalidRequestError(
                "a prompt is text, a list of token ids or a list of chat messages, "
                f"not {type(prompt).__name__}",
                param="prompt",
            )
        elif prompt and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            text = self._template.render(messages, True, **(chat_options or {}))
            template = self._template.origin
        if chat_options and template is None:
            raise InvalidRequestError(
                "chat_options are for chat messages only", param="chat_options"
            )
        if text is None:
            return Encoded(self._checked(prompt), None, None)
        tokenizer = self._tokenizer
        self._check_length(text)

        def encode() -> list[int]:
            if for_answer or template is not None:
                return tokenizer.encode_prompt(text)
            return tokenizer.encode(text)

        ids = encode() if len(text) <= _SHORT_TEXT else await asyncio.to_thread(encode)
        if not ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        return Encoded(self._checked(ids), text, template)

    def _check_length(self, text: str) -> None:
        """Encoding takes seconds per megabyte: what is hopeless is not worth the wait."""
        if self._context_tokens is None or len(text) <= max(_SHORT_TEXT, self._context_tokens):
            return
        if self._longest_token == 0:
            tokenizer = self._tokenizer
            self._longest_token = max(
                1, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab))
            )
        least = -(-len(text) // self._longest_token)  # a character takes a byte or more
        if least > self._context_tokens:
            raise ContextLengthError(
                f"the prompt has more than {least} tokens, the context holds "
                f"{self._context_tokens} with the answer; shorten the prompt",
                n_tokens=least,
                limit_tokens=self._context_tokens,
            )

    def n_lasting(self, encoded: Encoded, messages: Any, options: Mapping[str, Any]) -> int:
        """How many of a chat prompt's tokens the prompt of the next turn will begin with too.

        All but those that only open the answer, where the next turn leaves the reasoning out that
        follows them. Everything, if the template does not let us see where that begins.
        """
        text = self._template.render(messages, False, **options)
        if encoded.text is None or not encoded.text.startswith(text):
            return len(encoded.ids)
        ids = self._tokenizer.encode_prompt(text)
        n = len(ids)
        return n if n and encoded.ids[:n] == ids else len(encoded.ids)

    def _checked(self, ids: Any) -> list[int]:
        if not len(ids):
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        out = []
        for i in ids:
            if isinstance(i, bool) or not hasattr(i, "__index__"):
                raise InvalidRequestError(
                    f"a token id is an integer, not {i!r:.40}", param="prompt"
                )
            out.append(int(i))
            if not 0 <= out[-1] < self._n_vocab:
                raise InvalidRequestError(
                    f"token id {i} is outside the vocabulary of {self._n_vocab} tokens",
                    param="prompt",
                )
        return out
