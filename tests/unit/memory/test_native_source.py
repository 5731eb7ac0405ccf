"""The source of uvm.c: it compiles without warnings, needs only libc, and agrees with cuda.h."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src/gracetune/memory/native/uvm.c"
PEDANTIC = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Wstrict-prototypes"]
HEADERS = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_no_compiler_has_anything_to_say(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed here")
    command = [compiler, *PEDANTIC, "-Werror", "-c", str(SOURCE), "-o", str(tmp_path / "uvm.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_our_own_names_are_exported_and_only_libc_is_needed(workshop):
    library = workshop.shim("-fvisibility=hidden")
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert exported
    assert all(name.startswith("gt_") for name in exported)
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"NEEDED.*\[(.+?)\.so", needed))
    assert libraries <= {"libc", "libdl", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}


# How uvm.c writes the driver's types; enums and CUdevice are plain integers in the calling convention.
_TYPES = {
    "CUdeviceptr": "uint64_t",
    "CUmemLocation": "struct cu_location",
    "CUmemcpyAttributes": "struct cu_copy_attributes",
    "CUdevice": "int",
    "CUresult": "int",
    "CUmem_advise": "int",
    "CUmem_range_attribute": "int",
    "CUpointer_attribute": "int",
    "CUcontext": "void *",
    "CUstream": "void *",
}


def _normal(parameters: str) -> list[str]:
    """`CUdeviceptr *dptrs, size_t count` -> `["uint64_t *", "size_t"]`"""
    types = []
    for parameter in parameters.split(","):
        kind, stars = re.fullmatch(r"\s*((?:const )?[\w ]+?)\s*(\**)\s*\w+\s*", parameter).groups()
        types.append((_TYPES.get(kind, kind) + " " + stars).replace("* *", "**").strip())
    return types


def _ours() -> dict[str, list[str]]:
    table = SOURCE.read_text().split("#define DRIVER_FUNCTIONS(X)")[1].split("struct driver {")[0].replace("\\\n", " ")
    return {
        name: _normal(" ".join(given.split())) for name, given in re.findall(r"X\([01], (\w+),\s*\((.*?)\)\)", table)
    }


def _prototypes(*options: str) -> dict[str, list[str]]:
    command = ["gcc", "-E", "-P", *options, str(HEADERS[-1])]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\bCUresult\s+(\w+)\s*\(([^()]*)\)\s*;", text)
    return {name: _normal(" ".join(given.split())) for name, given in found if given.strip() != "void"}


@pytest.mark.skipif(
    not HEADERS, reason="no cuda.h here: a CUDA toolkit is not needed to build, only for this comparison"
)
class TestAgainstCudaHeader:
    def test_every_driver_function_has_the_parameters_of_cuda_h(self):
        # Preprocessed as a program sees it, prototypes carry the exported names (`cuMemAdvise_v2`); the old functions
        # behind the plain names are spelt out only for the driver's own sources.
        ours = _ours()
        prototypes = _prototypes("-D__CUDA_API_VERSION_INTERNAL") | _prototypes()
        assert len(ours) == 21
        assert {name: prototypes.get(name) for name in ours} == ours

    def test_the_numbers_are_those_of_cuda_h(self, tmp_path):
        expected = {
            "CU_MEM_LOCATION_TYPE_DEVICE": "CU_LOCATION_DEVICE",
            "CU_MEM_LOCATION_TYPE_HOST": "CU_LOCATION_HOST",
            "CU_MEM_ADVISE_SET_READ_MOSTLY": "CU_ADVISE_SET_READ_MOSTLY",
            "CU_MEM_ADVISE_SET_PREFERRED_LOCATION": "CU_ADVISE_SET_PREFERRED",
            "CU_MEM_ADVISE_SET_ACCESSED_BY": "CU_ADVISE_SET_ACCESSED_BY",
            "CU_MEM_ADVISE_UNSET_ACCESSED_BY": "CU_ADVISE_LAST",
            "CU_POINTER_ATTRIBUTE_IS_MANAGED": "CU_POINTER_IS_MANAGED",
            "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR": "CU_POINTER_RANGE_START",
            "CU_POINTER_ATTRIBUTE_RANGE_SIZE": "CU_POINTER_RANGE_SIZE",
            "CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY": "CU_RANGE_READ_MOSTLY",
            "CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION": "CU_RANGE_LAST_PREFETCH",
            "CU_MEM_ATTACH_GLOBAL": "CU_ATTACH_GLOBAL",
            "CU_MEMCPY_SRC_ACCESS_ORDER_ANY": "CU_SOURCE_ORDER_ANY",
            "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": "CU_COPY_BESIDE_COMPUTE",
            "CUDA_ERROR_INVALID_VALUE": "CU_ERROR_INVALID_VALUE",
            "CU_DEVICE_CPU": "GT_HOST",
        }
        start, end = "struct cu_location {", "/* These are the names that the library exports"
        ours = start + SOURCE.read_text().split(start, 1)[1].split(end)[0]
        lines = [f'#include "{HEADERS[-1]}"', "#include <stddef.h>", "enum { GT_HOST = -1 };", ours]
        lines += [f'_Static_assert((int){a} == (int){b}, "{a}");' for a, b in expected.items()]
        lines += [
            '_Static_assert(sizeof(CUmemLocation) == sizeof(struct cu_location), "size");',
            '_Static_assert(offsetof(CUmemLocation, id) == offsetof(struct cu_location, id), "id");',
            '_Static_assert(sizeof(CUmemcpyAttributes) == sizeof(struct cu_copy_attributes), "size");',
            '_Static_assert(offsetof(CUmemcpyAttributes, flags) == offsetof(struct cu_copy_attributes, flags), "f");',
            '_Static_assert(sizeof(CUdeviceptr) == 8 && sizeof(CUdevice) == 4 && sizeof(CUmem_advise) == 4, "widths");',
        ]
        unit = tmp_path / "check.c"
        unit.write_text("\n".join(lines))
        done = subprocess.run(["gcc", "-std=c11", "-fsyntax-only", str(unit)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
