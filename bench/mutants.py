def run(args: object) -> int:
    raise NotImplementedError
