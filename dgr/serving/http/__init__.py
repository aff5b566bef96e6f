"""A pipeline behind OpenAI's HTTP API (extra ``http``): starlette on anycorn under trio, prompts by deepseek-recipe."""
