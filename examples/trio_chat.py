"""Two turns of a conversation through three stages in this process.

python examples/trio_chat.py build/demo.gguf
"""

import sys

import trio

import dgr
from dgr.client.events import drain


async def main(model: str) -> None:
    async with dgr.open_pipeline(model, "0:15,15:29,29:43") as pipeline:
        events = pipeline.events()
        async with pipeline.session() as session:
            for prompt in ("The quick brown fox", " and then"):
                print(prompt, end="", flush=True)
                async for token in session.generate(prompt, max_tokens=16, stop=()):
                    print(token.text, end="", flush=True)
                print()
            print(f"{len(session.transcript)} tokens, {session.committed} committed on every stage")
        for event in drain(events):
            print(event)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
