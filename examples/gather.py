"""Answer several prompts at the same time: they share steps, the cache and every expert read."""

from __future__ import annotations

import asyncio

import aprefetch

PROMPTS = ("Once upon a time", "One day, a girl named", "It was early morning and")


async def main() -> None:
    params = aprefetch.SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9, seed=1)
    async with aprefetch.Runtime.open() as rt:
        answers = await asyncio.gather(*(rt.generate(prompt, params) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt}{answer.text}\n")
        stats = rt.stats()
        print(f"{stats.hit_rate:.0%} hits, {stats.bytes_read / 1e6:.1f} MB read")


if __name__ == "__main__":
    asyncio.run(main())
