"""Stream an answer of the model that ships with the package, token by token."""

from __future__ import annotations

import asyncio

import aprefetch


async def main() -> None:
    prompt = "Once upon a time"
    async with aprefetch.Runtime.open() as rt:  # a path to any supported GGUF goes here
        print(prompt, end="", flush=True)
        async with rt.stream(prompt, max_tokens=60, temperature=0) as stream:
            async for event in stream:
                print(event.text, end="", flush=True)
        print(f"\n[{stream.finish_reason}, {stream.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    asyncio.run(main())
