"""Glue from the core policy to SGLang's scheduler: what waits, what is cached, and the requests of a step."""
