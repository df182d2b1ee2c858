"""Glue from the core policy to SGLang's scheduler: what waits, what is cached, and one request per step."""
