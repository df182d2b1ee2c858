"""The policy's cost a step with 10,000 waiting requests, by the checkout in the working folder, as JSON lines."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

# In this checkout, and in one from before December 2026.
SCRIPTS = (Path("benchmarks/loop/policy.py"), Path("benchmarks/scheduler_overhead/run.py"))


def main() -> None:
    spec = importlib.util.spec_from_file_location("policy", next(filter(Path.exists, SCRIPTS)))
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    n_waiting, n_steps, n_tokens = (100, 20, 1_000) if "--quick" in sys.argv else (10_000, 200, script.PROMPT_TOKENS)
    for name, options in script.STEP_SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            engine = script.start(Path(folder), n_tokens, options)
            row = script.measure(engine, n_waiting, n_steps, n_tokens, None, 0)
        print(json.dumps({"what": f"policy, {name}", "ms": row["p50_ms"], "p99_ms": row["p99_ms"]}))


if __name__ == "__main__":
    main()
