"""What a start prints."""

from __future__ import annotations

import subprocess
import sys

LAUNCHER = """
import logging, sys, warnings
from sgl_prefill.entry import quiet_start
quiet_start.begin(sys.argv[1:])
logging.basicConfig(level="INFO", format="[time] %(message)s", force=True)  # as SGLang does
warnings.warn("no Triton")
logging.getLogger("sglang.srt").info("loads")
logging.getLogger("sglang.srt").error("reason")
logging.getLogger("sgl_prefill.part").info("measures")
logging.getLogger("sgl_prefill.part").warning("mind this")
quiet_start.end_launchers("serves")
logging.getLogger("sglang.srt").info("batch")
logging.getLogger("sgl_prefill.part").info("afterwards")
"""

INTERRUPTED = """
import os, signal
from sgl_prefill.entry import quiet_start
quiet_start.end_at_interrupt()
child = os.fork()
if child == 0:
    signal.raise_signal(signal.SIGINT)  # as a terminal sends it to all
    print("a child goes on", flush=True)
    signal.pause()
os.waitid(os.P_PID, child, os.WNOHANG | os.WEXITED)
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    print("an import catches all")
"""


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_start_shows_our_progress_and_errors_of_others() -> None:
    """It had printed 70 lines, most of them warnings of SGLang's imports about hardware that is not there."""
    assert run(LAUNCHER).stderr.splitlines() == [
        "sgl_prefill: starts: imports SGLang, which takes most of a start",
        "[time] reason",
        "sgl_prefill: measures",
        "sgl_prefill: warning: mind this",
        "sgl_prefill: serves, after 0 s",
        "[time] batch",
        "[time] afterwards",
    ]


def test_with_a_log_level_a_start_shows_everything() -> None:
    for flags in (("--log-level", "info"), ("--log-level=debug",)):
        shown = run(LAUNCHER, *flags).stderr
        assert "no Triton" in shown
        assert "[time] loads\n" in shown
        assert "[time] measures\n" in shown
        assert "sgl_prefill:" not in shown


def test_ctrl_c_ends_a_launcher_and_its_children_with_status_130_and_no_traceback() -> None:
    """Wherever it is: what it imports may catch everything."""
    done = run(INTERRUPTED)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr + done.stdout
    assert "catches all" not in done.stdout
    assert done.stderr.splitlines()[-1].startswith("sgl_prefill: ended by Ctrl-C before it served")
