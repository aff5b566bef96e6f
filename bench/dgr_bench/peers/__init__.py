"""``dgr-bench peers``: a pipeline over processes beside upstream's own way to spread a model, its RPC backend."""
