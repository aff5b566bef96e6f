"""dgr inside a plain synchronous program: three threads ask, two are answered at once and one waits for its turn.

python examples/blocking_threads.py build/demo.gguf
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import dgr
from dgr.serving import blocking
from dgr.serving.engine import Job, ServingLimits


def ask(serving: blocking.BlockingServing, prompt: str) -> str:
    with serving.admit(Job(serving.encode(prompt), max_tokens=12), deadline=60) as answer:
        text = "".join(token.text for token in answer)
    return f"{prompt}{text} ({answer.finish_reason}, {answer.usage.completion} tokens)"


def main(model: str) -> None:
    context = dgr.ContextParams(n_ctx=1024, n_seq_max=2)
    prompts = ["The quick brown fox", "Once upon a time", "It was a dark night"]
    with (
        blocking.open_serving(
            lambda: dgr.open_pipeline(model, "0:22,22:43", context=context), ServingLimits(max_waiting=4)
        ) as serving,
        ThreadPoolExecutor() as threads,
    ):
        for line in threads.map(lambda prompt: ask(serving, prompt), prompts):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1])
