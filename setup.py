"""Builds the native shim `gracetune/memory/native/_uvm.so`: plain C without Python.h, so one library fits every Python.

Puts the examples, and what else the guides' command lines name, into the wheel: `gracetune/checkout` has them under the
paths they have here (`examples/index.json` lists them). Everything else is in pyproject.toml.

Without a C compiler the install goes on: the package works, unified memory is reported as not available, and a small
text file in place of the library gives the reason.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError, ExecError, PlatformError

FOLDER = Path("gracetune/memory/native")
BUILD_FAILURE = "_uvm.build-failure.txt"  # binding.py reads it
SHIM = Extension(
    "gracetune.memory.native._uvm",
    sources=["src/gracetune/memory/native/uvm.c"],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
    libraries=["dl", "pthread"],  # part of libc from glibc 2.34 on; older systems still need the names
    optional=True,
)
MESSAGE = """
gracetune: the native unified-memory library could not be built, so unified memory will not be available.
  because   {reason}
  try       install a C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev) and install gracetune again
The rest of gracetune works without it.
"""


class BuildShim(build_ext):
    """`build_ext` for a library that is no Python module and may be missing."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # a library copied along from the source tree may be another machine's

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # there is no PyInit function

    def build_extension(self, ext: Extension) -> None:
        note = Path(self.build_lib) / FOLDER / BUILD_FAILURE
        note.unlink(missing_ok=True)
        try:
            self._use_a_compiler_that_is_here()
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            message = " ".join(str(error).split()) or type(error).__name__
            reason = message if isinstance(error, PlatformError) else f"its C compiler failed: {message}"
            sys.stderr.write(MESSAGE.format(reason=reason))
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # of an earlier build
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(reason + "\n", encoding="utf-8")

    def _use_a_compiler_that_is_here(self) -> None:
        """Python asks for the compiler it was built with; where that one is missing, any other C compiler will do."""
        if shutil.which(self.compiler.compiler_so[0]):
            return
        for name in ("cc", "gcc", "clang"):
            if shutil.which(name):
                self.compiler.set_executables(compiler_so=f"{name} -fPIC", linker_so=f"{name} -shared")
                return
        raise PlatformError("built without a C compiler (there was no cc, gcc or clang)")

    def copy_extensions_to_source(self) -> None:
        """An editable install: the library, or the note, goes beside uvm.c."""
        package = Path("src") / FOLDER
        (package / BUILD_FAILURE).unlink(missing_ok=True)
        (package / "_uvm.so").unlink(missing_ok=True)
        super().copy_extensions_to_source()
        note = Path(self.build_lib) / FOLDER / BUILD_FAILURE
        if note.is_file():
            shutil.copyfile(note, package / BUILD_FAILURE)

    def get_outputs(self) -> list[str]:
        return [name for name in super().get_outputs() if Path(name).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {built: source for built, source in super().get_output_mapping().items() if Path(built).exists()}


class CarryExamples(build_py):
    """A checkout has these files at its root, where an editable install finds them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            index = json.loads(Path("examples/index.json").read_text(encoding="utf-8"))
            carried = Path(self.build_lib) / "gracetune" / "checkout"
            shutil.rmtree(carried, ignore_errors=True)  # of an earlier build
            for name in ["examples/index.json", *(file for one in index.values() for file in one["files"])]:
                for file in [path for path in [Path(name), *sorted(Path(name).rglob("*"))] if path.is_file()]:
                    if "__pycache__" not in file.parts:
                        (carried / file).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, carried / file)


class ShimWheel(bdist_wheel):
    """One wheel per platform, for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[SHIM], cmdclass={"build_ext": BuildShim, "build_py": CarryExamples, "bdist_wheel": ShimWheel})
