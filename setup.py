"""The native kernels are built at installation where there is a compiler; without one the package installs all the same."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NAME = "sgl_prefill.cpu.native.kernels"
kernels: dict[str, Any] = runpy.run_path("sgl_prefill/cpu/native/build.py")


class BuildKernels(build_ext):
    """A library with a plain C interface: no Python headers, and one file for every version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            kernels["compile_library"](Path(self.get_ext_fullpath(ext.name)).absolute())
        except kernels["BuildError"] as error:
            print(f"the native kernels are not built, PyTorch's serve: {error}")

    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).exists()]

    def copy_extensions_to_source(self) -> None:
        if all(Path(output).exists() for output in super().get_outputs()):
            super().copy_extensions_to_source()


setup(ext_modules=[Extension(NAME, sources=[], optional=True)], cmdclass={"build_ext": BuildKernels})
