"""Collect the wheels that a machine without a registry lacks, in parts of a given size.

    python scripts/wheelhouse.py --out wheelhouse --python 3.12 --part-mib 60 --have torch triton numpy

Follows what this package, SGLang, flashinfer and the tests require on the other machine (Linux on x86_64), by the metadata
that is installed here; downloads the versions of this environment for the other machine's Python, builds this package's own
wheel, and deals the files into folders `part-0`, `part-1` ...; a wheel that is larger than a part is cut into pieces.
`contents.txt` says what is in which part. There, with all parts in one place:

    python scripts/wheelhouse.py --join wheelhouse && pip install --no-index --no-deps wheelhouse/whole/*.whl
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

# pip takes each name as it stands: a wheel for an older one is not found under a newer one.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17, 5)), "manylinux2014_x86_64")
# What is asked for; the rest is what these require. The last four are for benchmarks and tests.
OWN = "sgl-prefill"
ROOTS = (OWN, "sglang", "flashinfer-python", "aiohttp", "matplotlib", "pytest", "hypothesis")
REPOSITORY = Path(__file__).resolve().parents[1]
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
    wanted = required(ROOTS, arguments.python, arguments.have)
    failed = [
        one for one in wanted if _plain(Requirement(one).name) != OWN and not download(one, arguments.python, wheels)
    ]
    build_own(wheels)
    parts = deal(sorted(wheels.glob("*.whl")), arguments.out, arguments.part_mib << 20)
    contents = contents_of(parts)
    (arguments.out / "contents.txt").write_text(contents)
    print(contents, end="")
    if failed:
        print(f"no wheel for Python {arguments.python}: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def required(roots: Iterable[str], python: str, have: Iterable[str] = ()) -> list[str]:
    """Lists what these distributions require there, they among it, each with its version here.

    What is not installed here (a requirement of the other Python alone) is listed as it is required. What the other machine has
    is left out, with what nothing else requires.
    """
    there, found = environment_of(python), {_plain(name): "" for name in have}
    left, seen = [Requirement(root) for root in roots], set[tuple[str, str]]()
    while left:
        wanted = left.pop()
        name = _plain(wanted.name)
        if name in found and not found[name]:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = f"{name}{wanted.specifier}"
            continue
        found[name] = f"{name}=={distribution.version}"
        new = {(name, extra) for extra in ("", *wanted.extras)} - seen
        seen |= new
        for requirement in map(Requirement, distribution.requires or ()):
            if any(
                requirement.marker is None or requirement.marker.evaluate({**there, "extra": extra}) for _, extra in new
            ):
                left.append(requirement)
    return sorted(filter(None, found.values()))


def environment_of(python: str) -> dict[str, str]:
    """Says what markers of requirements ask of Linux on x86_64 with this Python."""
    full = f"{python}.0"
    return {
        **{name: str(value) for name, value in default_environment().items()},
        "implementation_name": "cpython",
        "implementation_version": full,
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": full,
        "python_version": python,
        "sys_platform": "linux",
    }


def download(requirement: str, python: str, folder: Path) -> bool:
    """Downloads one distribution without what it requires; returns whether there is a wheel of it."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python]
    done = subprocess.run([*command, *platforms, "--dest", str(folder), requirement], check=False)
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


def contents_of(parts: Sequence[Path]) -> str:
    """Says what is in which part, and how large it is."""
    lines = []
    for part in parts:
        files = sorted(part.iterdir())
        lines.append(f"{part.name}, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB:")
        lines += [f"  {file.name}" for file in files]
    return "".join(f"{line}\n" for line in lines)


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


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
