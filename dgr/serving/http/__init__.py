"""A pipeline behind OpenAI's and Anthropic's HTTP APIs (extra ``http``): starlette on anycorn under trio."""
