"""Collect the wheels that a machine without a registry lacks, in parts of a given size.

    python scripts/wheelhouse.py --out wheelhouse --python 3.12 --part-mib 60 --have torch triton numpy

Takes what a server of this environment imports, downloads it for the other machine's Python, builds this package's own wheel,
and deals the files into folders `part-0`, `part-1` ...; a wheel that is larger than a part is cut into pieces. There, with all
parts in one place:

    python scripts/wheelhouse.py --join wheelhouse && pip install --no-index --no-deps wheelhouse/whole/*.whl
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

# pip takes each name as it stands: a wheel for an older one is not found under a newer one.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17, 5)), "manylinux2014_x86_64")
# A server of a machine without a device imports none of these, and a CUDA server or its benchmarks do.
ALSO = ("sglang", "sglang-kernel", "flashinfer-python", "aiohttp", "requests", "matplotlib", "pytest", "hypothesis")
IMPORTED = """
import json, sys
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
OWN, REPOSITORY = "sgl-prefill", Path(__file__).resolve().parents[1]
PIECE = re.compile(r"(.*)\.piece-(\d+)-of-(\d+)$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the parts are written")
    parser.add_argument("--join", type=Path, help="put the pieces of all parts in this folder together")
    parser.add_argument("--python", default="3.12", help="of the other machine (default: 3.12)")
    parser.add_argument("--part-mib", type=int, default=60, help="largest part (default: 60)")
    parser.add_argument("--have", nargs="*", default=[], help="distributions that it has")
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.join is None):
        parser.error("give either --out or --join")
    if arguments.join is not None:
        join(arguments.join)
        return 0
    wheels = arguments.out / "wheels"
    missing = sorted(name for name in imported_distributions() if _plain(name) not in map(_plain, arguments.have))
    failed = [name for name in missing if not download(name, arguments.python, wheels)]
    build_own(wheels)
    deal(sorted(wheels.glob("*.whl")), arguments.out, arguments.part_mib << 20)
    if failed:
        print(f"no wheel for Python {arguments.python}: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def imported_distributions() -> set[str]:
    """Of a server of this environment, by what its processes import, and what one on a CUDA device needs besides."""
    printed = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True).stdout
    distributions = importlib.metadata.packages_distributions()
    imported = {name for module in json.loads(printed.splitlines()[-1]) for name in distributions.get(module, [])}
    return {name for name in imported if _plain(name) != OWN} | {name for name in ALSO if _is_installed(name)}


def download(name: str, python: str, folder: Path) -> bool:
    """The version of this environment; whether there is a wheel of it."""
    version = importlib.metadata.version(name)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python]
    done = subprocess.run([*command, *platforms, "--dest", str(folder), f"{name}=={version}"], check=False)
    return done.returncode == 0


def build_own(folder: Path) -> None:
    """This package's wheel, which no registry has. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True)


def deal(files: list[Path], out: Path, part_bytes: int) -> list[Path]:
    """Move the files into parts of at most `part_bytes`, the larger first; cut what does not fit into one."""
    pieces = [piece for file in files for piece in _cut(file, part_bytes)]
    parts: list[tuple[int, list[Path]]] = []
    for piece in sorted(pieces, key=lambda piece: piece.stat().st_size, reverse=True):
        n_bytes = piece.stat().st_size
        place = next((index for index, (used, _) in enumerate(parts) if used + n_bytes <= part_bytes), len(parts))
        if place == len(parts):
            parts.append((0, []))
        used, of_part = parts[place]
        parts[place] = used + n_bytes, [*of_part, piece]
    folders = []
    for number, (_, of_part) in enumerate(parts):
        folder = out / f"part-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for piece in of_part:
            piece.rename(folder / piece.name)
        folders.append(folder)
    return folders


def join(parts: Path) -> Path:
    """All wheels of the parts, whole again, in one folder. Raises ValueError where a piece is missing."""
    whole = parts / "whole"
    whole.mkdir(exist_ok=True)
    pieces: dict[str, dict[int, Path]] = {}
    counts: dict[str, int] = {}
    for path in parts.glob("part-*/*"):
        cut = PIECE.match(path.name)
        name, number, count = (cut.group(1), int(cut.group(2)), int(cut.group(3))) if cut else (path.name, 1, 1)
        pieces.setdefault(name, {})[number] = path
        counts[name] = count
    for name, of_file in pieces.items():
        if missing := set(range(1, counts[name] + 1)) - set(of_file):
            raise ValueError(f"{name}: pieces {sorted(missing)} of {counts[name]} are missing: fetch the other parts")
        (whole / name).write_bytes(b"".join(of_file[number].read_bytes() for number in sorted(of_file)))
    return whole


def _cut(file: Path, part_bytes: int) -> list[Path]:
    if file.stat().st_size <= part_bytes:
        return [file]
    raw, pieces = file.read_bytes(), []
    starts = range(0, len(raw), part_bytes)
    for number, start in enumerate(starts, start=1):
        pieces.append(file.with_name(f"{file.name}.piece-{number}-of-{len(starts)}"))
        pieces[-1].write_bytes(raw[start : start + part_bytes])
    file.unlink()
    return pieces


def _is_installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
