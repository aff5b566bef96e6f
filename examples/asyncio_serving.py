"""dgr inside an asyncio program: two clients at once, one of which gives up and takes another turn.

python examples/asyncio_serving.py build/demo.gguf
"""

import asyncio
import sys

from dgr import ContextParams
from dgr.serving import embed


async def answer(pipeline: embed.EmbeddedPipeline, prompt: str, n: int) -> str:
    async with pipeline.session() as session:
        return "".join([token.text async for token in await session.generate(prompt, max_tokens=n, stop=())])


async def impatient(pipeline: embed.EmbeddedPipeline, prompt: str) -> str:
    async with pipeline.session() as session:
        try:
            async with asyncio.timeout(0.05):
                async for _ in await session.generate(prompt, max_tokens=10_000, stop=()):
                    pass
        except TimeoutError:
            pass  # the session is kept where it stands: the next turn goes on from there, as iterating again would
        return "".join([token.text async for token in await session.generate(" Well?", max_tokens=8, stop=())])


async def main(model: str) -> None:
    context = ContextParams(n_ctx=1024, n_seq_max=2)
    async with embed.open_pipeline(model, "0:22,22:43", context=context) as pipeline:
        answers = await asyncio.gather(
            answer(pipeline, "The quick brown fox", 16), impatient(pipeline, "Once upon a time")
        )
        for text in answers:
            print(text)
        print(await pipeline.statistics())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
