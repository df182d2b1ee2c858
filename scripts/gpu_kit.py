"""Make the kit for a Hopper GPU on a machine with PyTorch and no package index: two archives of some 65 MiB together.

    python scripts/gpu_kit.py --out FOLDER [--fp8] [--bare PYTHON]

The packages, in the versions of this environment, are unpacked for the other machine's Python. sglang-kernel holds kernels for
many GPUs: what a Hopper GPU does not load is emptied in place (files, offsets and host code stay), and of FlashAttention 3 all
but bfloat16 with heads of 64 and 128. Tests and sources that no server reads are left out.

--bare names a Python like the other machine's, with its PyTorch and packages. With it SGLang's just-in-time kernels are compiled
ahead (needs CUDA in /usr/local/cuda or CUDA_HOME, no GPU), and what a server imports is imported there.

On the other machine, in the repository's root: `. scripts/gpu_setup.sh FOLDER && python3 -m pytest tests/gpu/test_kernels.py`.
Needs uv, xz, gcc, binutils and 5 GiB of disk; 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
PLATFORM = "x86_64-manylinux_2_36"
# What servers of both engines import, and the other machine lacks or has in another version.
PACKAGES = """
annotated-types apache-tvm-ffi cffi compressed-tensors dill distro fastapi flashinfer-python gguf httptools ipython
jiter jsonschema jsonschema-specifications loguru msgspec openai openai-harmony opentelemetry-api orjson
partial-json-parser pybase64 pycparser pydantic pydantic-core python-multipart pyzmq referencing rpds-py setproctitle
sglang sglang-kernel sniffio soundfile starlette tokenizers torch-memory-saver traitlets transformers
typing-inspection uvicorn watchfiles xgrammar zstandard
"""
FP8_PACKAGES = ["sgl-deep-gemm"]
LEFT_OUT = """
**/__pycache__ **/*.a **/*.pyi **/*.pxd **/*.pyx bin share tools build_backend.py build_utils.py traitlets/tests
jsonschema/tests jsonschema/benchmarks jsonschema_specifications/tests dill/tests IPython/terminal/tests
IPython/sphinxext referencing/tests zmq/tests sglang/test sglang/multimodal_gen/csrc sglang/multimodal_gen/runtime
sglang/multimodal_gen/test sglang/multimodal_gen/apps sglang/multimodal_gen/configs sglang/multimodal_gen/benchmarks
sglang/multimodal_gen/tools flashinfer/data/cccl/ci flashinfer/data/cccl/docs flashinfer/data/cccl/python
flashinfer/data/cccl/test flashinfer/data/cccl/examples flashinfer/data/cccl/libcudacxx/test
flashinfer/data/cccl/**/test flashinfer/data/cutlass/test flashinfer/data/cutlass/examples
flashinfer/data/cutlass/docs flashinfer/data/cutlass/media flashinfer/data/cutlass/python xgrammar/include
xgrammar/3rdparty torch_memory_saver_hook_mode_*_cu12.abi3.so
"""
STRIPPED = (
    "xgrammar/*.so",
    "openai_harmony/*.so",
    "tokenizers/*.so",
    "tvm_ffi/**/*.so",
    "zmq/**/*.so",
    "httptools/**/*.so",
)
# In the first archive, so that both are of one size.
FIRST = ("sgl_kernel", "sglang_kernel-*", "tvm_ffi", "apache_tvm_ffi-*", "jit")
# Of a server on a GPU; the model registry then imports all models.
IMPORTED = """
sglang.srt.entrypoints.http_server sglang.srt.entrypoints.engine sglang.srt.managers.scheduler
sglang.srt.managers.detokenizer_manager sglang.srt.model_executor.model_runner
sglang.srt.layers.attention.flashattention_backend sglang.srt.layers.attention.triton_backend
sglang.srt.layers.attention.flashinfer_backend sglang.srt.models.registry sglang.srt.compilation.compile
sglang.srt.constrained.xgrammar_backend sglang.srt.parser.reasoning_parser sgl_kernel.flash_attn flashinfer
torch_memory_saver gguf openai_harmony soundfile sgl_prefill.launch_server sgl_prefill.batch sgl_prefill.entry.launch
sgl_prefill.port.loop sgl_prefill.port.runner.shared_prefix_fa3 sgl_prefill.http.routes
"""

FAT_BINARY = struct.pack("<I", 0xBA55ED50)
HOPPER, ANOTHER = 90, 80  # compute capabilities
COMPRESSED = 0x8000  # flag of an image


class Image(NamedTuple):
    """Device code for one compute capability, in a library."""

    header: int  # place in the file
    is_binary: bool  # else PTX
    capability: int
    flags: int
    begin: int
    end: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="for the archives")
    parser.add_argument("--python", default="3.12", help="version on the other machine (default: 3.12)")
    parser.add_argument("--bare", type=Path, help="a Python like the other machine's")
    parser.add_argument("--fp8", action="store_true", help="with the kernels of FP8 models")
    parser.add_argument("--inside", choices=("compile", "import"), help=argparse.SUPPRESS)  # in the bare Python
    arguments = parser.parse_args()
    if arguments.inside is not None:
        return compile_kernels() if arguments.inside == "compile" else import_all()
    if arguments.out is None:
        parser.error("--out is missing: name a folder for the archives")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        failed = make(tree, arguments.python, arguments.bare, is_fp8=arguments.fp8)
        for archive in pack(tree, arguments.out):
            print(f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB")
    return failed


def make(tree: Path, python: str, bare: Path | None, *, is_fp8: bool) -> int:
    """Fills the folder. Returns the status of what runs in the bare Python. Raises CalledProcessError."""
    names = [*PACKAGES.split(), *(FP8_PACKAGES if is_fp8 else [])]
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in names]
    command = [
        "uv",
        "pip",
        "install",
        "--target",
        str(tree),
        "--no-deps",
        "--only-binary",
        ":all:",
        "--link-mode",
        "copy",
    ]
    subprocess.run([*command, "--python-version", python, "--python-platform", PLATFORM, *pinned], check=True)
    for library in sorted((tree / "sgl_kernel").rglob("*.so")):
        print(f"{library.name}: {trim(library, is_fp8=is_fp8) >> 20} MiB of device code stay", flush=True)
    for path in (path for pattern in LEFT_OUT.split() for path in list(tree.glob(pattern))):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in (path for pattern in STRIPPED for path in tree.glob(pattern)):
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
    if bare is None:
        return 0
    stub = stub_driver(tree)
    return max(in_bare(bare, tree, stub, what) for what in ("compile", "import"))


def images(code: bytes) -> Iterator[Image]:
    """Yields the device code of a library, as nvcc's fat binaries hold it."""
    place = code.find(FAT_BINARY)
    while place >= 0:
        header_bytes, n_bytes = struct.unpack_from("<HQ", code, place + 6)
        if header_bytes != 16 or place + n_bytes > len(code):  # not one: the number happens to stand there
            place = code.find(FAT_BINARY, place + 4)
            continue
        at, end = place + header_bytes, place + header_bytes + n_bytes
        while at < end:
            kind, _, entry_bytes, length = struct.unpack_from("<HHIQ", code, at)
            capability, flags = struct.unpack_from("<I", code, at + 28)[0], struct.unpack_from("<Q", code, at + 40)[0]
            yield Image(at, kind == 2, capability, flags, at + entry_bytes, at + entry_bytes + length)
            at += entry_bytes + length
        place = code.find(FAT_BINARY, end)


def trim(library: Path, *, is_fp8: bool = False) -> int:
    """Empties the device code that a Hopper GPU with these models never loads. Returns the bytes that stay.

    An emptied image for Hopper gets another capability: CUDA then says that there is no kernel, and reads no zeros.
    """
    code = library.read_bytes()
    trimmed, n_kept = bytearray(code), 0
    for image in images(code):
        is_kept = image.is_binary and image.capability == HOPPER and library.parent.name != "sm100"
        if is_kept and library.name.startswith("flash_ops"):
            is_kept = serves(code[image.begin : image.end], image.flags, is_fp8=is_fp8)
        if is_kept:
            n_kept += image.end - image.begin
            continue
        trimmed[image.begin : image.end] = bytes(image.end - image.begin)
        if image.capability == HOPPER:
            struct.pack_into("<I", trimmed, image.header + 28, ANOTHER)
    library.unlink()  # it may be a link into a cache
    library.write_bytes(trimmed)
    library.chmod(0o755)
    subprocess.run(["fallocate", "--dig-holes", str(library)], check=True)  # tar keeps holes
    return n_kept


def serves(image: bytes, flags: int, *, is_fp8: bool = False) -> bool:
    """Whether an image of FlashAttention is of Hopper's version, bfloat16 (or FP8) and heads of 64 or 128, or a helper of all.

    No launch refers to its compressed images, which are copies; seen by disassembling the host code of sglang-kernel 0.4.5.
    """
    if flags & COMPRESSED or b"CollectiveMainloopFwdSm80" in image:
        return False
    if b"CollectiveMainloopFwdSm90" not in image:
        return True
    if not is_fp8 and b"float_e4m3" in image:
        return False
    found = re.findall(rb"CollectiveMainloopFwdSm90ILi\d+E.{0,200}?ELi(\d+)ENS_1[02](?:bfloat16_t|float_e4m3_t)", image)
    return bool(found) and set(found) <= {b"64", b"128"} and b"ILi192EEEEEELi128" not in image  # K of 192 with V of 128


def in_bare(python: Path, tree: Path, stub: Path, what: str) -> int:
    """Runs a part of this program in a Python like the other machine's. Returns its status."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    cache = tree / "jit" / "tvm-ffi"
    environment = {
        **os.environ,
        "CUDA_HOME": home,
        "PATH": os.pathsep.join((f"{home}/bin", str(python.parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(tree), str(REPOSITORY))),
        "LD_LIBRARY_PATH": str(stub),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TVM_FFI_CACHE_DIR": str(cache),
        "TVM_FFI_CUDA_ARCH_LIST": "9.0a",
    }
    status = subprocess.run([str(python), __file__, "--inside", what], env=environment, check=False).returncode
    for path in list(cache.rglob("*")):
        if path.is_file() and path.suffix != ".so":
            path.unlink()
    return status


def stub_driver(tree: Path) -> Path:
    """Makes a folder with a libcuda of functions that fail, so that libraries load where there is no driver."""
    folder = tree.with_name("stub")
    folder.mkdir(exist_ok=True)
    libraries = [str(path) for path in (tree / "sgl_kernel").rglob("*.so")]
    symbols = subprocess.run(["nm", "-D", *libraries], capture_output=True, text=True, check=True).stdout
    names = sorted(set(re.findall(r" U (cu[A-Z]\w*)", symbols)) - {"cuDriverGetVersion"})
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)
    source += "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }\n"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-o",
        str(folder / "libcuda.so.1"),
        "-Wl,-soname,libcuda.so.1",
        "-xc",
        "-",
    ]
    subprocess.run(command, input=source, text=True, check=True)
    return folder


def compile_kernels() -> int:
    """Has SGLang compile what a Llama or Qwen asks for at its first step. Returns how many kernels failed."""
    import torch
    from sglang.kernels.jit.utils import override_jit_cuda_arch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_fused_add_rmsnorm_module, _jit_qknorm_module

    dtype = torch.bfloat16
    kernels = [
        *((_jit_kvcache_module, (n_bytes, n_bytes, 0)) for n_bytes in (2048, 512, 1024, 384, 256)),  # K of a token
        (activation_module, (dtype,)),
        *((_jit_fused_rope_module, (True, head_dim, dtype, dtype)) for head_dim in (128, 64)),
        (_jit_clamp_position_module, (torch.int64,)),
        (_jit_qknorm_module, (128, dtype)),
        (_jit_fused_add_rmsnorm_module, (dtype, False)),
    ]
    with override_jit_cuda_arch(9, 0), ThreadPoolExecutor(2) as pool:
        begun = [(make_one, options, pool.submit(make_one, *options)) for make_one, options in kernels]
        failed = [(make_one, options, one.exception()) for make_one, options, one in begun if one.exception()]
    for make_one, options, error in failed:
        print(f"{make_one.__name__}{options}: {str(error)[-500:]}", file=sys.stderr)
    print(f"kernels compiled: {len(kernels) - len(failed)} of {len(kernels)}", flush=True)
    return len(failed)


def import_all() -> int:
    """Imports what a server imports, on a card that is only said to be there. Returns how many modules failed."""
    import torch

    card = SimpleNamespace(major=9, minor=0, name="NVIDIA H100", total_memory=80 << 30, multi_processor_count=132)
    said = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: card,
        "get_device_name": lambda *_: card.name,
        "is_bf16_supported": lambda *_, **__: True,
    }
    vars(torch.cuda).update(said)
    failed, names = 0, IMPORTED.split()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    from sglang.srt.models.registry import ModelRegistry

    n_models = len(ModelRegistry.get_supported_archs())
    print(f"modules imported: {len(names) - failed} of {len(names)}; architectures: {n_models}", flush=True)
    return failed


def pack(tree: Path, out: Path) -> list[Path]:
    """Writes the archives and their sums. Raises CalledProcessError."""
    out.mkdir(parents=True, exist_ok=True)
    first = sorted({path.name for pattern in FIRST for path in tree.glob(pattern)})
    rest = sorted(path.name for path in tree.iterdir() if path.name not in first)
    archives, sums = [], []
    for number, members in ((1, first), (2, rest)):
        tar, archive = tree.with_name(f"kit-{number}.tar"), out / f"kit-{number}.tar.xz"
        same = ("--sparse", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=2026-01-01")
        subprocess.run(["tar", *same, "-C", str(tree), "-cf", str(tar), *members], check=True)
        with archive.open("wb") as file:
            subprocess.run(
                ["xz", "-T2", "--x86", "--lzma2=preset=9,dict=64MiB", "-c", str(tar)], stdout=file, check=True
            )
        tar.unlink()
        archives.append(archive)
        sums.append(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n")
    (out / "SHA256SUMS").write_text("".join(sums))
    return archives


if __name__ == "__main__":
    sys.exit(main())
