"""Picture of the dashboard's queue under WL1 at saturation, for the README: `scripts/screenshot.sh [FILE]`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from PIL import Image

from benchmarks.dashboard.open_page import BROWSER
from benchmarks.harness import client, engines, traffic
from benchmarks.harness.turns import Servers
from benchmarks.load.wl1 import POSTS, SCALE, SERVED

PICTURE = Path(__file__).resolve().parents[2] / "sgl_prefill" / "dashboard" / "queue.png"
MOST_BYTES = 200_000
COLORS = 256  # which show no difference in a page of few


def main() -> int:
    picture = Path(sys.argv[1]) if sys.argv[1:] else PICTURE
    dues = traffic.post_recommendation(None, "single", SCALE, n_users=20, n_posts=POSTS, names_users=True)
    served = SERVED._replace(flags_of_all=[*SERVED.flags_of_all, "--served-model-name", "small"])
    with Servers(served, 1) as servers:
        url = servers.of(engines.OURS).url
        is_done = threading.Event()

        def send() -> None:
            while not is_done.is_set():
                client.run(url, dues, "WL1")

        sender = threading.Thread(target=send)
        sender.start()
        try:
            subprocess.run([sys.executable, str(BROWSER), url, "--screenshot", str(picture)], check=True)
        finally:
            is_done.set()
            sender.join()
    Image.open(picture).convert("RGB").quantize(COLORS).save(picture, optimize=True)
    if picture.stat().st_size > MOST_BYTES:
        print(f"{picture} has {picture.stat().st_size} bytes, more than {MOST_BYTES}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
