"""The whole way in one command: start a server with the demo model, label 24 reviews, print the table, stop it.

python -m sgl_prefill.examples.demo [any flag of sgl_prefill.launch_server]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sgl_prefill.entry import local_server
from sgl_prefill.errors import SglPrefillError
from sgl_prefill.examples import demo_model, label_reviews
from sgl_prefill.startup.progress_bar import ProgressBar


def main() -> int:
    try:
        model = demo_model.ensure()
        with tempfile.TemporaryDirectory() as folder, ProgressBar() as bar:
            log = Path(folder) / "server.log"

            def on_wait(elapsed_s: float) -> None:
                bar.show(0, "starting the server (30 to 90 s on 2 cores)")

            with local_server.running("sgl_prefill.launch_server", sys.argv[1:], log, on_wait=on_wait) as server:
                bar.say(f"the server is ready after {bar.elapsed_s:.0f} s")
                print(label_reviews.table(label_reviews.label_all(server.url)))
                print(f"stopping the server; the demo model is in {model}", file=sys.stderr)
    except SglPrefillError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
